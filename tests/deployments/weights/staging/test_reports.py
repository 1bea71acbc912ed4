"""Reports on their way from a worker to its replica."""

import json

import pytest

from deployments.protocol.reports import Check, Outcome, StoreResult
from deployments.weights.staging.reports import (
    ConnectState,
    LoadPlanSummary,
    StagingState,
    from_bytes,
    from_wire,
    to_bytes,
    to_wire,
)

REPORTS = [
    ConnectState(done=True, outcome=Outcome.TRANSFER_FAILED, message="2 of 3 joined"),
    StagingState(
        payloads_done=2,
        size_bytes=1 << 40,
        stage_s=1.5,
        verify_s=0.5,
        outcome=Outcome.DONE,
        digest="ab",
        checks=(Check.NAMES, Check.FINITE),
    ),
    LoadPlanSummary(chunks=3, refused=("computes", "reads a number")),
    StoreResult(version=3, label=None, path="/store/v00000003", problem=""),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_is_decoded_as_it_was_encoded(report: object) -> None:
    encoded = to_wire(report)
    assert json.loads(json.dumps(encoded)) == encoded, "vLLM carries JSON types"
    assert from_wire(type(report), encoded) == report
    assert from_bytes(type(report), to_bytes(report)) == report


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(ValueError, match="payloads_done"):
        from_wire(StagingState, {"done": True, "outcome": "done"})
    with pytest.raises(ValueError, match="outcome"):
        from_bytes(ConnectState, b'{"done": true, "outcome": "broken"}')
