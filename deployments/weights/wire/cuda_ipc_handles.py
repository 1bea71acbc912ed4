"""CUDA IPC handles of vLLM's `ipc` engines in JSON types, for processes that must not unpickle and do not
import torch."""

import base64
from typing import Any

_HANDLES = "ipc_handles"
_MAX_DIMENSIONS = 64  # torch's own limit
_MAX_HANDLE_BYTES = 1024  # CUDA's have 64 to 66
_MIN_HANDLE_BYTES = 32  # a pickled handle may share parts with earlier ones


def encode_handle(handle: tuple[Any, ...]) -> dict[str, Any]:
    """A handle of `torch.multiprocessing.reductions.reduce_tensor` in JSON types. Raises ValueError."""
    try:
        (_, size, stride, offset, _, dtype, device, memory, size_bytes, offset_bytes, _, counter,
         counter_offset, event, sync) = handle  # fmt: skip
        return {
            "size": _integers(size),
            "stride": _integers(stride),
            "offset": int(offset),
            "dtype": str(dtype).removeprefix("torch."),
            "device": int(device),
            "memory": _text(memory),
            "size_bytes": int(size_bytes),
            "offset_bytes": int(offset_bytes),
            "counter": _text(counter),
            "counter_offset": int(counter_offset),
            "event": _text(event),
            "sync": bool(sync),
        }
    except (TypeError, ValueError) as error:
        count = f" of {len(handle)}" if isinstance(handle, tuple) else ""
        # Without its text, which may be endless.
        raise ValueError(
            f"expected the 15 parts of a CUDA IPC handle, got a {type(handle).__name__}{count}: {error}"
        ) from error


def _integers(values: Any) -> list[int]:
    if len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"expected at most {_MAX_DIMENSIONS} dimensions, got {len(values)}")
    return [int(n) for n in values]


def _text(handle: bytes) -> str:
    if len(handle) > _MAX_HANDLE_BYTES:
        raise ValueError(f"expected a handle of at most {_MAX_HANDLE_BYTES} bytes, got {len(handle)}")
    return base64.b64encode(handle).decode()


def encode_handles(handles: Any, limit: int | None = None) -> Any:
    """vLLM's `ipc_handles` in JSON types: one {GPU UUID: handle}, or a list of one per tensor. Raises
    ValueError, also for more than `limit` bytes can hold: a pickle can name one object many times."""
    parts = handles if isinstance(handles, list) else [handles]
    count = 0
    for part in parts:
        if not isinstance(part, dict):
            raise ValueError(f"expected a CUDA IPC handle by GPU UUID, got {type(part).__name__}")
        count += len(part)
    if limit is not None and count * _MIN_HANDLE_BYTES > limit:
        raise ValueError(f"expected CUDA IPC handles, got {count} of them in {limit} bytes")
    encoded = [{_uuid(gpu): encode_handle(handle) for gpu, handle in part.items()} for part in parts]
    return encoded if isinstance(handles, list) else encoded[0]


def _uuid(gpu: Any) -> str:
    if not isinstance(gpu, str):
        raise ValueError(f"expected the UUID of a GPU, got {type(gpu).__name__}")
    return gpu


def encode_payload(payload: Any) -> Any:
    if isinstance(payload, list):
        return [encode_payload(part) for part in payload]
    if not isinstance(payload, dict) or payload.get(_HANDLES) is None:
        return payload
    return payload | {_HANDLES: encode_handles(payload[_HANDLES])}


def decode_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_payload`. Raises ValueError."""
    handles = payload.get(_HANDLES)
    if handles is None:
        return payload
    if isinstance(handles, list):
        return payload | {_HANDLES: [_by_gpu(each) for each in handles]}
    return payload | {_HANDLES: _by_gpu(handles)}


def _by_gpu(handles: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    try:
        return {gpu: _decode_handle(encoded) for gpu, encoded in handles.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected encoded CUDA IPC handles by GPU UUID: {str(error)[:200]!r}") from error


def _decode_handle(encoded: dict[str, Any]) -> tuple[Any, ...]:
    import torch  # processes of the control plane only forward handles

    dtype = getattr(torch, str(encoded["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected a dtype, got {str(encoded['dtype'])[:60]!r}")
    size, stride = _lengths(encoded, "size"), _lengths(encoded, "stride")
    if len(size) != len(stride):
        raise ValueError(f"expected a stride for each of {len(size)} dimensions, got {len(stride)}")
    return (
        torch.Tensor,
        torch.Size(size),
        tuple(stride),
        _length(encoded, "offset"),
        torch.storage.TypedStorage,
        dtype,
        _length(encoded, "device"),
        _bytes(encoded, "memory"),
        _length(encoded, "size_bytes"),
        _length(encoded, "offset_bytes"),
        False,
        _bytes(encoded, "counter"),
        _length(encoded, "counter_offset"),
        _bytes(encoded, "event"),
        bool(encoded["sync"]),
    )


def _lengths(encoded: dict[str, Any], name: str) -> list[int]:
    if not isinstance(encoded[name], list) or len(encoded[name]) > _MAX_DIMENSIONS:
        raise ValueError(f"{name}: expected a list of at most {_MAX_DIMENSIONS} numbers")
    return [_checked(name, value) for value in encoded[name]]


def _length(encoded: dict[str, Any], name: str) -> int:
    return _checked(name, encoded[name])


def _checked(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name}: expected a number of at least 0, got {str(value)[:40]}")
    return value


def _bytes(encoded: dict[str, Any], name: str) -> bytes:
    data = base64.b64decode(encoded[name], validate=True)
    if len(data) > _MAX_HANDLE_BYTES:
        raise ValueError(f"{name}: expected at most {_MAX_HANDLE_BYTES} bytes, got {len(data)}")
    return data
