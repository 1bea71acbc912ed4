import json
from typing import Any

import pytest
import torch

from deployments.weights.wire.cuda_ipc_handles import (
    decode_payload,
    encode_handle,
    encode_handles,
    encode_payload,
)


def handle() -> tuple[Any, ...]:
    """As `torch.multiprocessing.reductions.reduce_tensor` returns it for a CUDA tensor."""
    storage = torch.storage.TypedStorage
    memory = (0, b"memory", 24, 512, False, b"counter", 3, b"event", True)
    return (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, storage, torch.bfloat16, *memory)


@pytest.mark.parametrize("handles", [{"GPU-1": handle()}, [{"GPU-1": handle()}, {"GPU-2": handle()}]])
def test_handles_are_the_same_after_the_wire(handles: Any) -> None:
    payload = {"names": ["a"], "ipc_handles": handles}
    assert decode_payload(json.loads(json.dumps(encode_payload(payload)))) == payload


def test_a_payload_for_each_worker_is_encoded_one_by_one() -> None:
    assert encode_payload([{"ipc_handles": {"GPU-1": handle()}}, {"names": []}]) == [
        {"ipc_handles": {"GPU-1": encode_handle(handle())}},
        {"names": []},
    ]


def test_what_is_no_handle_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^expected the 15 parts of a CUDA IPC handle, got a tuple of 2: "):
        encode_handle((1, 2))
    with pytest.raises(ValueError, match=r"^expected a CUDA IPC handle by GPU UUID, got str$"):
        encode_handles("GPU-1")


def changed(**parts: Any) -> dict[str, Any]:
    return {"GPU-1": encode_handle(handle()) | parts}


@pytest.mark.parametrize(
    "handles",
    [
        {"GPU-1": {"size": [2]}},
        {"GPU-1": 5},
        ["GPU-1"],
        changed(dtype="load"),
        changed(dtype="__dict__"),
        changed(dtype=["bfloat16"]),
        changed(size=[-2, 3]),
        changed(size=[2]),
        changed(size="23"),
        changed(stride=[True, 1]),
        changed(offset=-1),
        changed(size_bytes=1 << 63),
        changed(device="0"),
        changed(memory="!"),
        changed(memory="A" * 4000),
        changed(counter=None),
    ],
)
def test_what_cannot_be_decoded_is_refused(handles: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected encoded CUDA IPC handles by GPU UUID: "):
        decode_payload({"ipc_handles": handles})
