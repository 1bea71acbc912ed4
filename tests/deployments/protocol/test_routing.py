"""What a request's headers demand of the replica that answers it."""

import pytest

from deployments.protocol.errors import InvalidRequest
from deployments.protocol.routing import Demand, demand_of


def test_a_request_demands_what_its_headers_say() -> None:
    assert demand_of({}, 5.0) == Demand(timeout_s=5.0)
    headers = {"x-min-weight-version": "7", "x-weight-timeout": "0.5", "x-session-id": "a"}
    assert demand_of(headers, 5.0) == Demand(min_version=7, timeout_s=0.5, session_id="a")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-min-weight-version": "-1"},
        {"x-min-weight-version": "1.5"},
        {"x-weight-timeout": "soon"},
        {"x-weight-timeout": "nan"},
        {"x-weight-timeout": "inf"},
    ],
)
def test_weight_headers_must_be_numbers(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(headers))):
        demand_of(headers, 5.0)
