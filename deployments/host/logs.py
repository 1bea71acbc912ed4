"""Serve's logger. A `SlipstreamError` is a response, not a fault: its stack trace is cut to one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

from deployments.protocol.errors import SlipstreamError


def serve_logger() -> logging.Logger:
    logger = logging.getLogger("ray.serve")
    logger.addFilter(_shorten_answers)
    return logger


@contextmanager
def kept_log_file() -> Iterator[None]:
    """vLLM's logging configuration closes every handler; keep Serve's log file. A restarting Serve controller
    replaces replicas without a log file."""
    handlers = [each for each in logging.getLogger("ray.serve").handlers if isinstance(each, MemoryHandler)]
    files = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, file in zip(handlers, files, strict=True):
            if file is not None:
                handler.setTarget(file)


def _shorten_answers(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SlipstreamError):
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = f"{error.type}: {error.message}", ()
    return True
