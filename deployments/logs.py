"""Serve's logger, which the deployments share.

Serve logs whatever a method raises as "Request failed.", with a stack trace. An error that Slipstream raises
on purpose is an answer to the caller, not a fault: here it is one line.
"""

import logging

from deployments.errors import SlipstreamError


def serve_logger() -> logging.Logger:
    logger = logging.getLogger("ray.serve")
    logger.addFilter(_answers_briefly)  # the same one again is not added twice
    return logger


def _answers_briefly(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SlipstreamError):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = f"{error.type}: {error.message}", ()
    return True
