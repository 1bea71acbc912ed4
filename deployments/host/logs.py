"""Serve's logger, which all deployments share.

Serve logs every exception of a method with a stack trace. A `SlipstreamError` is a response to the caller and
not a fault, so a filter reduces it to one line.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

from deployments.protocol.errors import SlipstreamError


def serve_logger() -> logging.Logger:
    logger = logging.getLogger("ray.serve")
    logger.addFilter(_shorten_answers)  # adding it again has no effect
    return logger


@contextmanager
def kept_log_file() -> Iterator[None]:
    """Keep Serve's log file connected while vLLM configures logging for an engine.

    `logging.config` closes every existing handler, so Serve's lines would be lost. A restarting Serve
    controller asks each replica for its log file, and replaces those that have none.
    """
    handlers = [each for each in logging.getLogger("ray.serve").handlers if isinstance(each, MemoryHandler)]
    files = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            if file is not None:
                handler.setTarget(file)  # reopened by the next line


def _shorten_answers(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SlipstreamError):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = f"{error.type}: {error.message}", ()
    return True
