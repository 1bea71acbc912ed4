"""Where the training of an adapter goes on after a restart: on every rank exactly alike.

    the state file is newest   exactly what it was
    the live version is newer  (the state could not be written) its weights, and the state's moments
    neither                    the first values: a new training

Rank 0 looks, because it alone writes; the others receive what it found.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployments.host.durable_files import replacing, sync
from deployments.trainer.checkpoints import Checkpoints
from deployments.trainer.lora.publisher import LiveVersion
from deployments.trainer.stored_weights import StoredWeights, of_rank_0
from deployments.weights.store.versions import Store
from trainers.learner import Learner
from trainers.settings import LoraConfig

# The state of an adapter's training on disk: its weights and AdamW's moments, for a restart.
#
# trainer/lora-*/trainer_state.rank0.pt  the newest that is complete

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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial, partial.open("wb") as file:
                torch.save(dict(state), file)
            self.step = step
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
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
            sync(self.path.parent)


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rank 0 found."""

    state: State | None = None  # that fits this trainer
    problem: str | None = None  # why one that is there is not used
    live: Mapping[str, torch.Tensor] | None = None  # the newest version's tensors, if newer than the state
    live_step: int = 0


def settings(config: LoraConfig, base_version: int) -> dict[str, Any]:
    """What a state says of its adapter, so that it is not continued as another one."""
    return {"rank": config.rank, "alpha": config.alpha, "base_version": base_version}


def look(learner: Learner, file: StateFile, live: LiveVersion | None, own: Mapping[str, Any]) -> Found:
    """Called on rank 0.

    Args:
        live: of this fleet's trainer.
        own: see `settings`.

    Raises:
        ValueError: the state or the live version is of an adapter with other settings.
        OSError: the live version cannot be read.
    """
    adapter = learner.policy.adapter
    assert adapter is not None, "only an adapter is continued here"
    state, problem = _state(file)
    if state is not None:
        _check(learner, state, file, own)
    step = None if state is None else int(state["steps_done"])
    if live is None or live.step is None or (step is not None and live.step <= step):
        return Found(state=state, problem=problem)
    try:
        values = adapter.read(live.path)
    except ValueError as error:
        raise ValueError(
            f"version {live.version} of the adapter is live, and is not one of this trainer's settings: "
            f"{error}; choose another 'trainer.lora.name', or unload it"
        ) from error
    return Found(state=state, problem=problem, live=values, live_step=live.step)


def go_on(learner: Learner, found: Found | None) -> str | None:
    """Continue from what rank 0 found. Called on every rank.

    Args:
        found: on rank 0; None elsewhere.

    Returns:
        None if the learner is exactly what it was, or new. Else in what it differs, for the log.
    """
    agreed = of_rank_0(found)
    assert agreed is not None, "rank 0 has looked"
    adapter, state = learner.policy.adapter, agreed.state
    assert adapter is not None, "only an adapter is continued here"
    if agreed.live is None:
        if state is not None:
            learner.load_state_dict(state)
        return None if state is not None else agreed.problem
    adapter.restore(agreed.live)
    if state is not None:
        learner.load_state_dict(state, weights=False)
    learner.restart(agreed.live_step, keep_moments=state is not None)
    if state is None:
        if agreed.live_step == 0:  # it has no moments
            return None
        return f"weights as published, moments start at zero: {agreed.problem or 'there is no state'}"
    return f"weights as published, moments of step {state['steps_done']}"


def _state(file: StateFile) -> tuple[State | None, str | None]:
    try:
        state = file.read()
        return {**state, "lora": dict(state["lora"])}, None
    except FileNotFoundError:
        return None, None
    except Exception as error:  # a damaged file raises anything; training goes on without it
        line = str(error).partition("\n")[0]
        return None, f"{file.path} cannot be used: {type(error).__name__}: {line}"


def _check(learner: Learner, state: State, file: StateFile, own: Mapping[str, Any]) -> None:
    adapter = learner.policy.adapter
    assert adapter is not None, "only an adapter is continued here"
    try:
        adapter.check(state["weights"])
        learner.check_state(state)
        for key in ("rank", "alpha"):
            if state["lora"][key] != own[key]:
                raise ValueError(f"{key!r} must be {own[key]}, got {state['lora'][key]}")
    except ValueError as error:
        raise ValueError(
            f"{file.path} is the state of another adapter: {error}; choose another 'trainer.lora.name', or "
            "move it away to start anew"
        ) from error


# An adapter whose sum with its base is published: which weights are its base, and where it goes on.
#
# The base is what the trainer was started from: the model, or a stored version. After a restart
#
#     a checkpoint of the stored version's step   the same base and adapter: exactly where it was
#     none that can be used                       the stored version is the base, and the adapter begins anew:
#                                                 the policy is what the fleet serves, moments start at zero


class MergedAdapter:
    """The base of an adapter, on one rank of a trainer.

    Attributes:
        base_version: the version that is the base; 0: the model.
    """

    def __init__(self, config: LoraConfig, store: Store, stored: StoredWeights) -> None:
        self.config = config
        self._store, self._stored = store, stored
        self.base_version = 0

    def find_base(self, checkpoints: Checkpoints, version: int, fleet_id: str | None, model: Path) -> Path:
        """Decide on the base of a trainer that starts, and say where it is. Called on every rank.

        Args:
            version: the newest in the store; 0: there is none.
            model: the directory of version 0.
        """
        saved = of_rank_0(None if version == 0 else self._saved_base(checkpoints, version, fleet_id))
        self.base_version = version if saved is None or not self._is_usable(saved) else saved
        return self._store.path_of(self.base_version) if self.base_version else model

    def about(self) -> Mapping[str, Any]:
        """What a checkpoint says of it, so that it is not continued as another one."""
        return settings(self.config, self.base_version)

    def _is_usable(self, version: int) -> bool:
        if version == 0:
            return True
        return version in of_rank_0(list(self._store.list())) and self._stored.problem(version) is None

    def _saved_base(self, checkpoints: Checkpoints, version: int, fleet_id: str | None) -> int | None:
        """The base of a checkpoint of the version's weights."""
        manifest = self._store.manifest_of(version)
        for _, about in checkpoints.complete(fleet_id):
            saved = about.adapter
            if manifest.trainer_step is None or not about.is_of(manifest.trainer_step, manifest.digest):
                continue
            if saved is not None and isinstance(saved.get("base_version"), int):
                return int(saved["base_version"])
        return None
