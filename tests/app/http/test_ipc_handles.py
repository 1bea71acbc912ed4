"""Pickled CUDA IPC handles: refused, or read by an unpickler that knows nothing else."""

import base64
import json
import pickle
from typing import Any

import pytest
import torch

from app.http.ipc_handles import refuse_or_restrict
from deployments.protocol.errors import InvalidRequest
from deployments.weights.wire.cuda_ipc_handles import decode_payload


def handles(value: object) -> dict[str, Any]:
    return {"names": ["a"], "ipc_handles_pickled": base64.b64encode(pickle.dumps(value)).decode()}


def ipc_handle() -> tuple[Any, ...]:
    """As torch's `reduce_tensor` makes it of a tensor on a GPU."""
    storage = torch.storage.TypedStorage
    memory = (0, b"memory", 24, 512, False, b"counter", 3, b"event", True)
    return (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, storage, torch.bfloat16, *memory)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("owned",)


@pytest.mark.parametrize("wrap", [lambda payload: payload, lambda payload: [{}, payload]])
def test_pickled_handles_need_the_switch(wrap: Any) -> None:
    with pytest.raises(InvalidRequest, match="allow_pickled_ipc_over_http"):
        refuse_or_restrict(wrap(handles([])), allowed=False)


def test_a_payload_without_handles_is_passed_on() -> None:
    payload: Any = [{"segment": "a"}, {"names": []}]
    assert refuse_or_restrict(payload, allowed=False) == payload


def test_handles_are_read_into_json_types() -> None:
    read: Any = refuse_or_restrict(handles([{"GPU-1": ipc_handle()}]), allowed=True)
    assert decode_payload(json.loads(json.dumps(read)))["ipc_handles"] == [{"GPU-1": ipc_handle()}]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (handles(Evil()), r"expected CUDA IPC handles only, got a reference to builtins\.print"),
        ({"ipc_handles_pickled": "!!"}, "ipc_handles_pickled cannot be read"),
        ({"ipc_handles_pickled": 3}, "ipc_handles_pickled: expected base64 text, got int"),
        (handles({"GPU-1": ipc_handle()[:9]}), "expected the 15 parts of a CUDA IPC handle"),
        (handles("handle"), "handle by GPU UUID, got str"),
    ],
)
def test_anything_else_is_refused(payload: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        refuse_or_restrict(payload, allowed=True)
