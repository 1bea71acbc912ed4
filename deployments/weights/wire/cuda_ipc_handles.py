"""CUDA IPC handles of vLLM's own `ipc` engines, encoded in JSON types and decoded.

On the way to a worker they pass through processes that must not unpickle and that do not import torch.
"""

import base64
from typing import Any

_HANDLES = "ipc_handles"


def encode_handle(handle: tuple[Any, ...]) -> dict[str, Any]:
    """A CUDA IPC handle, as `torch.multiprocessing.reductions.reduce_tensor` returns it, in JSON types.

    Raises:
        ValueError: not such a handle.
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


def encode_handles(handles: Any) -> Any:
    """vLLM's `ipc_handles` in JSON types: one {GPU UUID: handle}, or a list with one for each tensor.

    Raises:
        ValueError: not handles by GPU UUID.
    """
    if isinstance(handles, list):
        return [encode_handles(each) for each in handles]
    if not isinstance(handles, dict):
        raise ValueError(f"expected a CUDA IPC handle by GPU UUID, got {type(handles).__name__}")
    return {str(gpu): encode_handle(handle) for gpu, handle in handles.items()}


def encode_payload(payload: Any) -> Any:
    """A payload of vLLM's trainer engines with its IPC handles in JSON types; any other payload unchanged.

    Raises:
        ValueError: its `ipc_handles` are not handles by GPU UUID.
    """
    if isinstance(payload, list):
        return [encode_payload(part) for part in payload]
    if not isinstance(payload, dict) or payload.get(_HANDLES) is None:
        return payload
    return payload | {_HANDLES: encode_handles(payload[_HANDLES])}


def decode_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_payload`, as vLLM's IPC engine expects it.

    Raises:
        ValueError: a handle is not one of `encode_handle`.
    """
    handles = payload.get(_HANDLES)
    if handles is None:
        return payload
    if isinstance(handles, list):
        return payload | {_HANDLES: [_by_gpu(each) for each in handles]}
    return payload | {_HANDLES: _by_gpu(handles)}


def _by_gpu(handles: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    try:
        return {gpu: _decode_handle(encoded) for gpu, encoded in handles.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected encoded CUDA IPC handles by GPU UUID: {error!r}") from error


def _decode_handle(encoded: dict[str, Any]) -> tuple[Any, ...]:
    import torch  # here: processes of the control plane only forward handles

    return (
        torch.Tensor,
        torch.Size(encoded["size"]),
        tuple(encoded["stride"]),
        encoded["offset"],
        torch.storage.TypedStorage,
        getattr(torch, encoded["dtype"]),
        encoded["device"],
        base64.b64decode(encoded["memory"]),
        encoded["size_bytes"],
        encoded["offset_bytes"],
        False,
        base64.b64decode(encoded["counter"]),
        encoded["counter_offset"],
        base64.b64decode(encoded["event"]),
        encoded["sync"],
    )
