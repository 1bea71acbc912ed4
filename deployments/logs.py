"""The logger that all deployments share: Serve's.

Serve logs every exception of a method as "Request failed." with a stack trace. A `SlipstreamError` is an
answer to the caller and not a fault, so a filter reduces it to one line.
"""

import logging

from deployments.errors import SlipstreamError


def serve_logger() -> logging.Logger:
    """Serve's logger, with the filter."""
    logger = logging.getLogger("ray.serve")
    logger.addFilter(_shorten_answers)  # adding it again has no effect
    return logger


def _shorten_answers(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SlipstreamError):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = f"{error.type}: {error.message}", ()
    return True
