"""The state of an adapter's training on disk: its weights and AdamW's moments, for a restart.

trainer/lora-*/trainer_state.rank0.pt       the newest that is complete
trainer/lora-*/trainer_state.rank0.partial  being written; renamed when it is on the disk
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

State = Mapping[str, Any]  # what `Learner.state_dict` returns


class StateFile:
    """The file of one rank, below `directory`.

    Attributes:
        step: of the state that this process has written; None: of none that is there.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"trainer_state.rank{rank}.pt"
        self.step: int | None = None

    def write(self, state: State, step: int) -> None:
        """Replace the file; when this returns, the new one survives a crash of the host.

        Raises:
            OSError: the file cannot be written; the former one stays.
        """
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            _sync(self.path.parent)
            self.step = step
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
            with contextlib.suppress(OSError):
                partial.unlink()  # it may be what fills the disk
            raise OSError(_one_line(error)) from error

    def read(self) -> State:
        """The state on the CPU, read from the disk as its tensors are used.

        Raises:
            FileNotFoundError: there is no file.
            Exception: of any class, if the file is damaged.
        """
        state: State = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        return state

    def remove(self) -> None:
        """Remove the file, if there is one.

        Raises:
            OSError: it cannot be removed.
        """
        self.step = None
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
            _sync(self.path.parent)


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
