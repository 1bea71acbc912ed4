"""Copies a trainer's tensors to pinned host memory, on separate CUDA streams. Copies to pageable memory delay
other threads' work."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from deployments.host.logs import serve_logger
from deployments.weights.wire.chunk_layout import plan_chunks, view
from trainers.sources import ParameterSource

# torch rounds pinned memory up to a power of two: this size wastes little.
_BLOCK_BYTES = 1 << 30
# Gathered tensors live until copied: at most two such batches.
_BATCH_BYTES = 1 << 29
logger = serve_logger()


def in_host_memory(content: torch.Tensor) -> torch.Tensor:
    """A GPU's is copied to pinned memory, which torch reuses: new pageable memory takes thirty
    times as long."""
    if content.device.type != "cuda":
        return content
    copy = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
    # It waits for what the current stream has queued, but delays nothing queued later.
    stream = _stream(content.device)
    stream.wait_stream(torch.cuda.current_stream(content.device))
    with torch.cuda.stream(stream):
        copy.copy_(content, non_blocking=True)
        torch.cuda.current_stream(content.device).synchronize()
    return copy


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class GpuCopier:
    """Copies published weights from a GPU for the store, while they are sent. Pins memory for two versions at
    the start, which takes seconds."""

    def __init__(self, source: ParameterSource) -> None:
        device = source.device
        self._device = device
        chunks = plan_chunks([(s.name, s.dtype, s.shape) for s in source.specs()], _BLOCK_BYTES)
        # Without digests' space, which would double a full block.
        self._sizes = [chunk.table_offset for chunk in chunks]
        self._slots = {entry.name: (i, entry) for i, chunk in enumerate(chunks) for entry in chunk.entries}
        self._stream = torch.cuda.Stream(device)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # targets and sources of a batch
        self._waiting_bytes = 0
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # the batch before
        self._blocks: list[torch.Tensor] = []
        thread = ThreadPoolExecutor(max_workers=1)
        self._reserved: Future[list[torch.Tensor]] | None = thread.submit(self._reserve)
        thread.shutdown(wait=False)

    def begin(self) -> None:
        self._waiting, self._waiting_bytes = [], 0
        if self._reserved is not None:
            self._blocks, self._reserved = self._reserved.result(), None
        if not self._blocks:
            self._blocks = self._allocate()

    def _reserve(self) -> list[torch.Tensor]:
        """For one version; torch's allocator keeps as much again for the next one."""
        with torch.cuda.device(self._device):
            blocks, _ = self._allocate(), self._allocate()
        return blocks

    def _allocate(self) -> list[torch.Tensor]:
        return [pinned(size) for size in self._sizes]

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        block, entry = self._slots[name]
        target = view(entry, self._blocks[block])
        self._waiting.append((target, tensor))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes >= _BATCH_BYTES:
            self._begin_copies()
        return target

    def wait(self) -> None:
        if self._waiting:
            self._begin_copies()
        self._stream.synchronize()
        self._copied, self._blocks = [], []

    def _begin_copies(self) -> None:
        """One call for a batch: from Python a tensor takes longer than its copy."""
        self._stream.synchronize()
        self._copied, self._waiting, self._waiting_bytes = self._waiting, [], 0
        targets, sources = zip(*self._copied, strict=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)


def pinned(size_bytes: int) -> torch.Tensor:
    """Uint8 [size_bytes], pinned if the host allows it."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # unpinned copies are slower but correct
        logger.warning("%d bytes of host memory cannot be pinned: %s", size_bytes, error)
        return torch.empty(size_bytes, dtype=torch.uint8)
