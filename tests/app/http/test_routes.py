"""Our own routes' bodies, tokens and IPC handles, without a fleet behind them."""

import base64
import json
import pickle
from typing import Any

import pytest
import torch
from starlette.requests import Request

from app.http.auth import Guard, Unauthorized
from app.http.bodies import field, json_object
from app.http.ipc_handles import refuse_or_restrict
from app.http.metrics import exposition
from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.request_headers import demand_of
from deployments.weights.wire.cuda_ipc_handles import decode_payload


def request(path: str = "/pause", body: bytes = b"", **headers: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw}
    return Request(scope, receive)


def test_control_routes_need_the_token_and_open_ones_do_not() -> None:
    guard = Guard("secret")
    guard.check(request("/fleet"))
    guard.check(request("/pause", authorization="Bearer secret"))
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}):
        with pytest.raises(Unauthorized, match="/pause needs the header"):
            guard.check(request("/pause", **headers))
    Guard(None).check(request("/pause"))


@pytest.mark.parametrize(
    ("body", "words"), [(b"{x", "must be JSON"), (b"[1]", "got list"), (b'"a"', "got str")]
)
async def test_a_body_that_is_no_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await json_object(request(body=body), 100)


async def test_a_body_that_is_too_large_is_refused() -> None:
    with pytest.raises(PayloadTooLarge, match="at most 10 bytes"):
        await json_object(request(body=b"x" * 11), 10)


def test_a_field_of_another_type_is_refused_with_both_types() -> None:
    assert field({}, "label", str, None) is None
    with pytest.raises(InvalidRequest, match="'version' must be of type int, got str"):
        field({"version": "7"}, "version", int)
    with pytest.raises(InvalidRequest, match="must have the field 'version', got"):
        field({"x": 1}, "version", int)


def handles(value: object) -> dict[str, Any]:
    return {"names": ["a"], "ipc_handles_pickled": base64.b64encode(pickle.dumps(value)).decode()}


def ipc_handle() -> tuple[Any, ...]:
    """As torch's `reduce_tensor` makes it of a tensor on a GPU."""
    storage = torch.storage.TypedStorage
    place = (0, b"memory", 24, 512, False, b"counter", 3, b"event", True)
    return (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, storage, torch.bfloat16, *place)


def test_pickled_handles_need_the_switch() -> None:
    with pytest.raises(InvalidRequest, match="allow_pickled_ipc_over_http"):
        refuse_or_restrict(handles([]), allowed=False)


def test_handles_are_read_and_nothing_else_is() -> None:
    read = refuse_or_restrict(handles([{"GPU-1": ipc_handle()}]), allowed=True)
    assert decode_payload(json.loads(json.dumps(read)))["ipc_handles"] == [{"GPU-1": ipc_handle()}]

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("owned",)

    with pytest.raises(InvalidRequest, match=r"builtins\.print"):
        refuse_or_restrict(handles(Evil()), allowed=True)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        refuse_or_restrict({"ipc_handles_pickled": "!!"}, allowed=True)
    with pytest.raises(InvalidRequest, match="expected the 15 parts of a CUDA IPC handle"):
        refuse_or_restrict(handles({"GPU-1": ipc_handle()[:9]}), allowed=True)
    with pytest.raises(InvalidRequest, match="handle by GPU UUID, got str"):
        refuse_or_restrict(handles("handle"), allowed=True)


@pytest.mark.parametrize(
    "headers", [{"x-min-weight-version": "-1"}, {"x-min-weight-version": "1.5"}, {"x-weight-timeout": "soon"}]
)
def test_weight_headers_must_be_numbers(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(headers))):
        demand_of(headers, 5.0)


def test_the_exposition_counts_rounds_and_replicas() -> None:
    fleet = {
        "committed_version": 7,
        "stored_version": 6,
        "epoch": 2,
        "members": [{"replica_id": "a", "version": 7, "state": "serving"}],
    }
    timings = {"gap_s": 0.5, "stage_s": 1.0}
    rounds = [
        {"phase": "aborted", "replicas": {}, "duration_s": 1.0},
        {"phase": "committed", "replicas": {"a": timings}, "duration_s": 2.0},
    ]
    text = exposition(fleet, rounds)
    assert "slipstream_weight_version 7.0" in text and "slipstream_stored_weight_version 6.0" in text
    assert 'slipstream_rounds{phase="aborted"} 1.0' in text
    assert 'slipstream_last_round_gap_seconds{replica="a"} 0.5' in text
