"""Copies of published weights in host memory, for the store, taken while the weights go out.

From a GPU they are queued on a stream of their own, into pinned memory that is taken once and used again:
neither the transfer nor the replicas wait for them, only `finish` does. So many blocks of memory exist
as versions are on their way at once (one being written, one that waits, one being taken), each as large
as the model.
"""

import weakref
from collections import deque

import torch

from deployments.logs import serve_logger
from deployments.weights.packing import plan_chunks, view
from trainers.sources import ParameterSource

_UNBOUNDED = 1 << 62
# Gathered tensors live until their copy is through: no more of them than this at a time.
_IN_FLIGHT_BYTES = 1 << 30
logger = serve_logger()


class Snapshot(dict[str, torch.Tensor]):
    """Tensors by name, whose memory is used again once the snapshot is dropped."""


class Snapshots:
    """Takes one snapshot at a time of what a source yields."""

    def __init__(self, source: ParameterSource) -> None:
        self._source = source
        self._device = source.device
        self._open = Snapshot()
        self._taker: _Taker | None = None
        if self._device.type == "cuda":
            self._taker = _Taker(source, self._device)

    def begin(self) -> None:
        """Drop what was not finished, and start anew."""
        self._open = Snapshot()  # first: its memory is free then
        if self._taker is not None:
            self._open = self._taker.begin()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._taker is None:
            self._open[name] = tensor.to("cpu", copy=True)
        else:
            self._taker.add(self._open, name, tensor)

    def finish(self) -> Snapshot:
        """Returns when every byte is there; the model may change afterwards."""
        if self._taker is not None:
            self._taker.wait()
        taken, self._open = self._open, Snapshot()
        return taken


class _Taker:
    """Queues copies from a GPU into blocks of pinned memory."""

    def __init__(self, source: ParameterSource, device: torch.device) -> None:
        self._source = source
        (chunk,) = plan_chunks([(s.name, s.dtype, s.shape) for s in source.specs()], _UNBOUNDED)
        self._entries = {entry.name: entry for entry in chunk.entries}
        self._size_bytes = chunk.size_bytes
        self._stream = torch.cuda.Stream(device)
        self._own: frozenset[int] = frozenset()
        self._in_flight: deque[tuple[torch.cuda.Event, int]] = deque()
        self._block = torch.empty(0, dtype=torch.uint8)
        self._free = [pinned(self._size_bytes)]  # the first one here, not in the first round

    def begin(self) -> Snapshot:
        self._own = self._source.storages()
        self._in_flight.clear()
        block = self._block = self._free.pop() if self._free else pinned(self._size_bytes)
        snapshot = Snapshot()
        weakref.finalize(snapshot, self._free.append, block).atexit = False
        return snapshot

    def add(self, snapshot: Snapshot, name: str, tensor: torch.Tensor) -> None:
        target = view(self._entries[name], self._block)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(tensor, non_blocking=True)
        snapshot[name] = target
        if tensor.untyped_storage().data_ptr() in self._own:
            return
        tensor.record_stream(self._stream)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        self._in_flight.append((copied, tensor.nbytes))
        while sum(size for _, size in self._in_flight) > _IN_FLIGHT_BYTES:
            self._in_flight.popleft()[0].synchronize()

    def wait(self) -> None:
        self._stream.synchronize()
        self._in_flight.clear()


def pinned(size_bytes: int) -> torch.Tensor:
    """Host memory (uint8 [size_bytes]) that a GPU can reach by itself, if the host allows it.

    Registered, because torch's own pinned memory comes in powers of two: up to twice as much.
    """
    block = torch.empty(size_bytes, dtype=torch.uint8)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size_bytes, 0))
    except RuntimeError as error:  # copies are slower then, and as right
        logger.warning("%d bytes of host memory cannot be pinned: %s", size_bytes, error)
    return block
