"""What Serve's log shows of a call that fails."""

import pytest

from deployments.errors import Conflict
from deployments.logs import serve_logger


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
    logger.addHandler(caplog.handler)  # Ray's logger does not pass its records on
    try:
        raise error
    except type(error):
        logger.exception("Request failed.")  # as Serve does
    finally:
        logger.removeHandler(caplog.handler)
    record = caplog.records[-1]
    assert (record.levelname, record.getMessage(), bool(record.exc_info)) == (level, message, traced)


def test_modules_that_share_it_filter_once() -> None:
    filters = list(serve_logger().filters)
    assert serve_logger().filters == filters
