"""What Serve's log shows of a call that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.host.logs import serve_logger
from deployments.protocol.errors import Conflict


@pytest.mark.parametrize(
    ("error", "level", "message", "traced"),
    [
        (Conflict("the fleet sleeps"), "WARNING", "conflict: the fleet sleeps", False),
        (RuntimeError("broken"), "ERROR", "Request failed.", True),
    ],
)
def test_an_answer_is_a_line_and_a_fault_keeps_its_trace(
    error: Exception, level: str, message: str, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logger = serve_logger()
    try:
        raise error
    except type(error):
        logger.exception("Request failed.")  # as Serve does
    record = caplog.records[-1]
    assert (record.levelname, record.getMessage(), bool(record.exc_info)) == (level, message, traced)


CONFIGURED = """
import logging.config, sys
from contextlib import nullcontext
from logging.handlers import MemoryHandler, RotatingFileHandler
from deployments.host.logs import kept_log_file

logger = logging.getLogger("ray.serve")
logger.addHandler(MemoryHandler(1, target=RotatingFileHandler(sys.argv[1])))  # as Serve configures a replica
with kept_log_file() if sys.argv[2] == "kept" else nullcontext():
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as vLLM does for an engine
logger.warning("replica a is fenced")
print(logger.handlers[0].target is not None)  # a Serve controller that restarts takes its name
"""


@pytest.mark.parametrize(
    ("how", "line", "target"), [("kept", "replica a is fenced\n", "True"), ("not", "", "False")]
)
def test_a_replicas_log_survives_an_engine_that_configures_logging(
    tmp_path: Path, how: str, line: str, target: str
) -> None:
    file = tmp_path / "replica.log"
    command = [sys.executable, "-c", CONFIGURED, str(file), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (file.read_text(), done.stdout.strip()) == (line, target)
