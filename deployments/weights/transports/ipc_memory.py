"""CUDA memory that two processes share, described in JSON types; no pickle is involved."""

import base64
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """A CUDA storage that another process can open: what torch's `_share_cuda_` returns, bytes in base64."""

    memory: str
    size_bytes: int
    offset_bytes: int
    counter: str  # in shared memory: torch counts there who uses the storage
    counter_offset: int
    event: str
    sync: bool


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_memory(tensor: torch.Tensor) -> MemoryHandle:
    """The handle of a CUDA tensor's storage, which must outlive its users."""
    # The first part is this process's index of the device.
    _, memory, size, offset, counter, counter_offset, event, sync = tensor.untyped_storage()._share_cuda_()
    return MemoryHandle(
        memory=base64.b64encode(memory).decode(),
        size_bytes=size,
        offset_bytes=offset,
        counter=base64.b64encode(counter).decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        sync=sync,
    )


def open_memory(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    """The storage of another process (uint8 [handle.size_bytes]).

    Raises:
        ValueError: the handle is not one of `share_memory`, or the driver refuses it.
    """
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,  # the sender may number its devices otherwise
            base64.b64decode(handle.memory),
            handle.size_bytes,
            handle.offset_bytes,
            base64.b64decode(handle.counter),
            handle.counter_offset,
            base64.b64decode(handle.event),
            handle.sync,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the CUDA IPC handle cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
