"""Copies of published weights in host memory, for the store, taken while the weights go out.

From a GPU they are queued on a stream of their own, into torch's pinned memory, which it takes from the
host once and uses again: neither the transfer nor the replicas wait for them, only `finish` does. It
grows to as many versions as are on their way at once: one being written, one that waits, one being taken.
"""

from collections import deque

import torch

from deployments.logs import serve_logger
from deployments.weights.wire.chunk_layout import plan_chunks, view
from trainers.sources import ParameterSource

# torch rounds pinned memory up to a power of two: in pieces of this size little of it is lost.
_PIECE_BYTES = 1 << 30
# Gathered tensors live until their copy is through: no more of them than this at a time.
_IN_FLIGHT_BYTES = 1 << 30
logger = serve_logger()


Snapshot = dict[str, torch.Tensor]  # by name


class Snapshots:
    """Takes one snapshot at a time of what a source yields."""

    def __init__(self, source: ParameterSource) -> None:
        self._source = source
        self._device = source.device
        self._open: Snapshot = {}
        self._taker: _Taker | None = None
        if self._device.type == "cuda":
            self._taker = _Taker(source, self._device)

    def begin(self) -> None:
        """Drop what was not finished, and start anew."""
        self._open = {}
        if self._taker is not None:
            self._taker.begin()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._taker is None:
            self._open[name] = tensor.to("cpu", copy=True)
        else:
            self._open[name] = self._taker.add(name, tensor)

    def finish(self) -> Snapshot:
        """Returns when every byte is there; the model may change afterwards."""
        if self._taker is not None:
            self._taker.wait()
        taken, self._open = self._open, {}
        return taken


class _Taker:
    """Queues copies from a GPU into pinned memory."""

    def __init__(self, source: ParameterSource, device: torch.device) -> None:
        self._source = source
        pieces = plan_chunks([(s.name, s.dtype, s.shape) for s in source.specs()], _PIECE_BYTES)
        # Without room for digests, which would double a piece that is full.
        self._sizes = [piece.table_offset for piece in pieces]
        self._places = {entry.name: (i, entry) for i, piece in enumerate(pieces) for entry in piece.entries}
        self._stream = torch.cuda.Stream(device)
        self._own: frozenset[int] | None = None
        self._in_flight: deque[tuple[torch.cuda.Event, int]] = deque()
        self._pieces = self._memory()  # for the first round: pinning takes seconds

    def begin(self) -> None:
        self._own = None
        self._in_flight.clear()
        if not self._pieces:
            self._pieces = self._memory()

    def _memory(self) -> list[torch.Tensor]:
        return [pinned(size) for size in self._sizes]

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, which is complete after `wait`."""
        if self._own is None:  # here and not in `begin`, for which the round waits
            self._own = self._source.storages()
        piece, entry = self._places[name]
        target = view(entry, self._pieces[piece])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(tensor, non_blocking=True)
        if tensor.untyped_storage().data_ptr() in self._own:
            return target
        tensor.record_stream(self._stream)
        copied = torch.cuda.Event()
        copied.record(self._stream)
        self._in_flight.append((copied, tensor.nbytes))
        while sum(size for _, size in self._in_flight) > _IN_FLIGHT_BYTES:
            self._in_flight.popleft()[0].synchronize()
        return target

    def wait(self) -> None:
        self._stream.synchronize()
        self._in_flight.clear()
        self._pieces = []


def pinned(size_bytes: int) -> torch.Tensor:
    """Host memory (uint8 [size_bytes]) that a GPU can reach by itself, if the host allows it."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # copies are slower then, and as right
        logger.warning("%d bytes of host memory cannot be pinned: %s", size_bytes, error)
        return torch.empty(size_bytes, dtype=torch.uint8)
