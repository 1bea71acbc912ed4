"""Where the training of an adapter goes on after a restart: on every rank exactly alike.

    the state file is newest   exactly what it was
    the live version is newer  (the state could not be written) its weights, and the state's moments
    neither                    the first values: a new training

Rank 0 looks, because it alone writes; the others receive what it found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deployments.trainer.lora.publisher import LiveVersion
from deployments.trainer.lora.state_file import State, StateFile
from deployments.trainer.stored_weights import of_rank_0
from trainers.learner import Learner
from trainers.settings import LoraConfig


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
