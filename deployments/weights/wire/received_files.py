"""Files that arrive as tensors of bytes, written to a directory of shared memory, which gets its name once
all digests were compared."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

PART_BYTES = 8 << 20


class ReceivedFiles:
    """Files for a directory that must not exist; None: another worker of this host writes them."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._partial = None if directory is None else directory.with_name(f"{directory.name}.partial")

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write whole files. Raises ValueError if one is not the bytes of a file, or cannot be written."""
        for name, tensor in tensors:
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or Path(name).name != name:
                kind = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name!r}: expected the bytes of a file, uint8 [size], got {kind}")
            if self._partial is None:
                continue
            try:
                self._partial.mkdir(mode=0o700, exist_ok=True)
                _write(self._partial / name, tensor)
            except OSError as error:  # /dev/shm is full: the files are then loaded from the store
                raise ValueError(f"{name!r} cannot be written to shared memory: {error}") from error

    def complete(self) -> None:
        if self._directory is not None and self._partial is not None:
            self._partial.rename(self._directory)

    def close(self) -> None:
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)


def _write(path: Path, content: torch.Tensor) -> None:
    with path.open("xb", buffering=0) as file:
        for left in _on_host(content.contiguous()):
            while left:  # memory that is almost full takes a part
                left = left[file.write(left) :]


def _on_host(content: torch.Tensor) -> Iterator[memoryview]:
    """The parts of a tensor; from a GPU the next is copied to pinned memory while one is used."""
    if content.device.type != "cuda":
        yield memoryview(content.numpy())
        return
    halves = torch.empty(2, PART_BYTES, dtype=torch.uint8, pin_memory=True)
    ready = None
    for index, part in enumerate(content.split(PART_BYTES)):
        copy = halves[index % 2, : len(part)]
        copy.copy_(part, non_blocking=True)
        copied = torch.cuda.current_stream(content.device).record_event()
        if ready is not None:
            yield memoryview(ready.numpy())
        copied.synchronize()
        ready = copy
    if ready is not None:
        yield memoryview(ready.numpy())
