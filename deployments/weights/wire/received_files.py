"""Files that arrive as tensors, their bytes (uint8 [size]): written to a directory of shared memory.

The directory has its name once all bytes are there and their digests were compared. The name is of another
process (see `ownership`), and goes with it.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch


class ReceivedFiles:
    """Files on their way into a directory.

    Args:
        directory: must not exist; None: nothing is written, because another worker of this host does.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._partial = None if directory is None else directory.with_name(f"{directory.name}.partial")

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write whole files.

        Raises:
            ValueError: a tensor is not the bytes of a file, or they cannot be written here.
        """
        for name, tensor in tensors:
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or Path(name).name != name:
                kind = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name!r}: expected the bytes of a file, uint8 [size], got {kind}")
            if self._partial is None:
                continue
            try:
                self._partial.mkdir(mode=0o700, exist_ok=True)
                _write(self._partial / name, tensor)
            except OSError as error:  # a full /dev/shm: the sender has another way
                raise ValueError(f"{name!r} cannot be written to shared memory: {error}") from error

    def complete(self) -> None:
        """All of them are there and were compared."""
        if self._directory is not None and self._partial is not None:
            self._partial.rename(self._directory)

    def close(self) -> None:
        """Remove what is not complete."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)


def _write(path: Path, content: torch.Tensor) -> None:
    """From where it is, once, into the file's memory.

    Raises:
        OSError: there is no room for it.
    """
    with path.open("xb") as file:
        if content.numel() == 0:
            return
        # Else a full /dev/shm is said by a signal, in the copy.
        os.posix_fallocate(file.fileno(), 0, content.numel())
    memory = torch.from_file(str(path), shared=True, size=content.numel(), dtype=torch.uint8)
    memory.copy_(content)
