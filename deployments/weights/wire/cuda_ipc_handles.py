"""CUDA IPC handles as vLLM's own `ipc` engines exchange them, in JSON types and back.

On their way to a worker they pass through processes that must not unpickle, and that have no torch.
"""

import base64
from typing import Any

_HANDLES = "ipc_handles"


def plain_handle(handle: tuple[Any, ...]) -> dict[str, Any]:
    """A CUDA IPC handle, as `torch.multiprocessing.reductions.reduce_tensor` makes it, in JSON types.

    Raises:
        ValueError: something else.
    """
    try:
        (_, size, stride, offset, _, dtype, device, memory, size_bytes, offset_bytes, _, counter,
         counter_offset, event, sync) = handle  # fmt: skip
        return {
            "size": [int(n) for n in size],
            "stride": [int(n) for n in stride],
            "offset": int(offset),
            "dtype": str(dtype).removeprefix("torch."),
            "device": int(device),
            "memory": base64.b64encode(memory).decode(),
            "size_bytes": int(size_bytes),
            "offset_bytes": int(offset_bytes),
            "counter": base64.b64encode(counter).decode(),
            "counter_offset": int(counter_offset),
            "event": base64.b64encode(event).decode(),
            "sync": bool(sync),
        }
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected the 15 parts of a CUDA IPC handle, got {str(handle)[:200]}: {error}"
        ) from error


def plain_handles(handles: Any) -> Any:
    """vLLM's `ipc_handles`: one {GPU UUID: handle}, or a list with one for each tensor.

    Raises:
        ValueError: something else.
    """
    if isinstance(handles, list):
        return [plain_handles(each) for each in handles]
    if not isinstance(handles, dict):
        raise ValueError(f"expected a CUDA IPC handle by GPU UUID, got {type(handles).__name__}")
    return {str(gpu): plain_handle(handle) for gpu, handle in handles.items()}


def plain_payload(payload: Any) -> Any:
    """A payload of vLLM's trainer engines with its IPC handles in JSON types; any other as it is."""
    if isinstance(payload, list):
        return [plain_payload(part) for part in payload]
    if not isinstance(payload, dict) or payload.get(_HANDLES) is None:
        return payload
    return payload | {_HANDLES: plain_handles(payload[_HANDLES])}


def with_handles(payload: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_payload`, as vLLM's IPC engine wants it."""
    handles = payload.get(_HANDLES)
    if handles is None:
        return payload
    if isinstance(handles, list):
        return payload | {_HANDLES: [_by_gpu(each) for each in handles]}
    return payload | {_HANDLES: _by_gpu(handles)}


def _by_gpu(handles: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    return {gpu: _handle(plain) for gpu, plain in handles.items()}


def _handle(plain: dict[str, Any]) -> tuple[Any, ...]:
    import torch  # not in the processes of the control plane, which only pass handles on

    return (
        torch.Tensor,
        torch.Size(plain["size"]),
        tuple(plain["stride"]),
        plain["offset"],
        torch.storage.TypedStorage,
        getattr(torch, plain["dtype"]),
        plain["device"],
        base64.b64decode(plain["memory"]),
        plain["size_bytes"],
        plain["offset_bytes"],
        False,
        base64.b64decode(plain["counter"]),
        plain["counter_offset"],
        base64.b64decode(plain["event"]),
        plain["sync"],
    )
