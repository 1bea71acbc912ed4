import json

import pytest

from deployments.protocol.poll import Check, Outcome, StoreResult
from deployments.weights.staging.worker_reports import (
    StagingState,
    from_wire,
    to_wire,
)

REPORTS = [
    StagingState(
        payloads_done=2,
        size_bytes=1 << 40,
        stage_s=1.5,
        verify_s=0.5,
        outcome=Outcome.DONE,
        digest="ab",
        checks=(Check.NAMES, Check.FINITE),
    ),
    StoreResult(version=3, label=None, path="/store/v00000003", problem=""),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_is_decoded_as_it_was_encoded(report: object) -> None:
    encoded = to_wire(report)
    assert json.loads(json.dumps(encoded)) == encoded, "vLLM carries JSON types"
    assert from_wire(type(report), encoded) == report
