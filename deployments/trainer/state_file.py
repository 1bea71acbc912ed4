"""The state of a trainer rank on disk: AdamW's moments and master weights, for a restart.

    trainer/trainer_state.rank0.pt       the newest that is complete
    trainer/trainer_state.rank0.partial  being written; renamed when it is on the disk

A state is written after the round of its step, while another thread writes the version of that step to the
store, and not after every step: after a crash the two may be of different steps. Weights come from the store
then, because they are what the fleet serves.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.learner import Learner

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


def resume(learner: Learner, file: StateFile, step: int) -> str | None:
    """Continue from the learner's weights, those of a stored version, with what is in the state file.

    Every rank must call it: all of them restore a state of one step, or none does.

    Args:
        step: optimizer steps that the weights have had.

    Returns:
        None if the learner is exactly what it was after that step. Else in what it differs, for the log.
    """
    state, own = _look(learner, file, step)
    ranks = _all_ranks(own)
    problem = _problem(ranks)
    if problem is not None:
        learner.restart(step, keep_moments=False)
        return f"moments start at zero: {problem}"
    exact = all(rank.exact for rank in ranks)
    learner.load_state_dict(state, weights=exact)
    # Moments that are a few steps older than the weights are better than none.
    learner.restart(step, keep_moments=True)
    return None if exact else f"weights as stored, moments of step {own.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a rank found on its disk; all ranks see all of them."""

    step: int = 0  # of the state
    exact: bool = False  # the state is of the stored weights, and has what publishing rounded
    problem: str | None = None  # why there is no state to restore


def _look(learner: Learner, file: StateFile, step: int) -> tuple[State, _Found]:
    try:
        state = file.read()
        learner.check_state(state)
        saved_step = int(state["steps_done"])
        return state, _Found(step=saved_step, exact=saved_step == step and learner.is_exact(state))
    except FileNotFoundError:
        return {}, _Found(problem=f"there is no {file.path}")
    except Exception as error:  # a damaged file raises anything; training goes on without it
        return {}, _Found(problem=f"{file.path} cannot be used: {type(error).__name__}: {_one_line(error)}")


def _all_ranks(own: _Found) -> list[_Found]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def _problem(ranks: list[_Found]) -> str | None:
    for rank in ranks:
        if rank.problem is not None:
            return rank.problem
    steps = [rank.step for rank in ranks]
    return f"the ranks have states of steps {steps}" if len(set(steps)) > 1 else None


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
