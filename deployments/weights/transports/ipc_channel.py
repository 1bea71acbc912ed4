"""The channel of transport `ipc`: two buffers on a GPU and a page of counters, open in two processes.

A counter is `round << 32 | chunks`, so what a broken round left behind is never taken for the next
one's. Every wait has a deadline. Handles travel as JSON; no pickle is involved.
"""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deployments.errors import TransferFailed
from deployments.weights.transports.counters import ABSENT, Counters

BUFFERS = 2
PUBLISHED, GIVEN_UP, TAKEN = 0, 1, 2  # places in the page: the last is rank 0's
_POLL_S = 0.0001  # each look costs the interpreter's lock, for which the thread that decodes waits


class Page:
    """The counters of one channel, mapped into both processes, and the waits for them."""

    def __init__(self, words: Counters, timeout_s: float) -> None:
        self._words = words
        self._timeout_s = timeout_s

    def __getitem__(self, place: int) -> int:
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value

    def workers(self) -> list[int]:
        """The places of the workers that have opened the channel."""
        return [place for place in range(TAKEN, len(self._words)) if self._words[place] != ABSENT]

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise TransferFailed(f"{what}: nothing came in {self._timeout_s:g} s")
            time.sleep(_POLL_S)


def create_page(world_size: int, timeout_s: float) -> tuple[str, Page]:
    """A new channel's counters, and the name under which the workers open them."""
    name, words = Counters.create(TAKEN + world_size)
    words[PUBLISHED] = 0
    return name, Page(words, timeout_s)


def open_page(name: str, timeout_s: float) -> Page:
    """Map a channel's counters.

    Raises:
        ValueError: no such page on this host; names outside our own are refused.
    """
    return Page(Counters.open(name), timeout_s)


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def share_buffer(block: torch.Tensor) -> list[Any]:
    """What another process needs to open a CUDA buffer, as JSON types."""
    shared = block.untyped_storage()._share_cuda_()
    return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]


def open_buffer(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The buffer (uint8) that `share_buffer` of another process describes.

    Raises:
        ValueError: this is not such a handle, or the driver refuses it.
    """
    try:
        _, memory, size, offset, counter, counter_offset, event, sync = handle
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,  # the sender's numbering need not be ours
            base64.b64decode(memory),
            int(size),
            int(offset),
            base64.b64decode(counter),
            int(counter_offset),
            base64.b64decode(event),
            bool(sync),
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the CUDA IPC handle cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gathered(value: Any) -> list[Any]:
    """The value of every trainer rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
