"""Calls of our routes, and of the few of vLLM's that our programs need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import JsonValue, TypeAdapter

from app.client.connection import Call, Reader
from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import (
    AdapterList,
    AdapterReport,
    FleetLoad,
    FleetStatus,
    Health,
    History,
    RolloutSample,
    SavedCheckpoint,
    SizeStatus,
    Status,
    TrainerStatus,
    WorldSize,
)
from trainers.trajectory import Trajectory

T = TypeVar("T")
Object = dict[str, JsonValue]


def health() -> Call[Health]:
    """Fails with status 503 while no replica serves."""
    return Call(method="GET", path="/health", read=typed(Health))


def fleet() -> Call[FleetStatus]:
    return Call(method="GET", path="/fleet", read=typed(FleetStatus))


def rounds() -> Call[Sequence[RoundReport]]:
    """Ended rounds, oldest first."""
    return Call(method="GET", path="/fleet/rounds", read=_then(typed(History), lambda made: made.rounds))


def load() -> Call[FleetLoad]:
    return Call(method="GET", path="/fleet/load", read=typed(FleetLoad))


def adapters() -> Call[Sequence[AdapterStatus]]:
    return Call(
        method="GET", path="/fleet/adapters", read=_then(typed(AdapterList), lambda made: made.adapters)
    )


def publish_directory(path: str, label: str | None = None) -> Call[RoundReport]:
    """Publish a checkpoint directory that is visible on every replica's host."""
    body = {"path": path} if label is None else {"path": path, "label": label}
    return Call(method="POST", path="/fleet/publish", body=body, read=typed(RoundReport), repeatable=False)


def rollback(version: int) -> Call[RoundReport]:
    body = {"version": version}
    return Call(method="POST", path="/fleet/rollback", body=body, read=typed(RoundReport), repeatable=False)


def scale(replicas: int | Literal["auto"]) -> Call[SizeStatus]:
    body = {"replicas": replicas}
    return Call(method="POST", path="/fleet/scale", body=body, read=typed(SizeStatus))


def pause(mode: Literal["keep", "wait", "abort"] | None = None) -> Call[Status]:
    """Stop generating; `mode` None is the fleet's default for running requests."""
    query = {} if mode is None else {"mode": mode}
    return Call(method="POST", path="/pause", query=query, read=typed(Status))


def resume() -> Call[Status]:
    return Call(method="POST", path="/resume", read=typed(Status))


def world_size() -> Call[int]:
    read = _then(typed(WorldSize), lambda made: made.world_size)
    return Call(method="GET", path="/get_world_size", read=read)


def disconnect() -> Call[None]:
    """Close the fleet's end of a transfer."""
    return Call(method="POST", path="/shutdown_weight_transfer_engine", read=lambda content, headers: None)


# -- the trainer -----------------------------------------------------------------------------------


def step(trajectories: Sequence[Trajectory], settings: str | None = None) -> Call[Object]:
    """One optimizer step; `settings` is JSON of `trainers.settings.StepSettings`."""
    from trainers.trajectory_arrays import MEDIA_TYPE, to_bytes  # numpy is slow to import

    return Call(
        method="POST",
        path="/train/step",
        content=to_bytes(trajectories, settings),
        headers={"content-type": MEDIA_TYPE},
        read=_object(),
        repeatable=False,
    )


def publish(
    label: str | None = None, step: int | None = None, after: int | None = None
) -> Call[RoundReport | AdapterReport]:
    """Publish the trainer's weights or adapter. Refused unless it has done `step` optimizer steps, and unless
    its own version, or `after`, is committed."""
    given = {"label": label, "step": step, "after": after}
    body = {name: value for name, value in given.items() if value is not None}
    return Call(method="POST", path="/train/publish", body=body, read=_published(), repeatable=False)


def report_step(
    run: str, step: int, values: Mapping[str, float], rollouts: Sequence[RolloutSample] = ()
) -> Call[Status]:
    """Report a job's step for the page."""
    samples = [asdict(each) for each in rollouts]
    body = {"run": run, "step": step, "values": dict(values), "rollouts": samples}
    return Call(method="POST", path="/train/report", body=body, read=typed(Status))


def save(path: str | None = None) -> Call[SavedCheckpoint]:
    """Write a checkpoint; `path` None: the trainer chooses a directory on its host."""
    body = {} if path is None else {"path": path}
    read = typed(SavedCheckpoint)
    return Call(method="POST", path="/train/save", body=body, read=read, repeatable=False)


def train_status() -> Call[TrainerStatus]:
    return Call(method="GET", path="/train/status", read=typed(TrainerStatus))


# -- vLLM's ----------------------------------------------------------------------------------------


def model() -> Call[str]:
    """Name of the served model."""
    return Call(method="GET", path="/v1/models", read=_then(_object(), _first_model))


def tokenize(model: str, prompt: str) -> Call[list[int]]:
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    read = _then(_object(), lambda made: TypeAdapter(list[int]).validate_python(made["tokens"]))
    return Call(method="POST", path="/tokenize", body=body, read=read)


def tokenize_chat(model: str, messages: Sequence[Mapping[str, str]]) -> Call[list[int]]:
    """Token ids of a conversation, with the generation prompt."""
    body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
    read = _then(_object(), lambda made: TypeAdapter(list[int]).validate_python(made["tokens"]))
    return Call(method="POST", path="/tokenize", body=body, read=read)


# -- reading ---------------------------------------------------------------------------------------


@cache
def typed(kind: type[T]) -> Reader[T]:
    """Reads JSON; ignores unknown fields, which a newer fleet may send."""
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    return lambda content, headers: adapter.validate_json(content)


@cache
def _published() -> Reader[RoundReport | AdapterReport]:
    adapter: TypeAdapter[RoundReport | AdapterReport] = TypeAdapter(RoundReport | AdapterReport)
    return lambda content, headers: adapter.validate_json(content)


def _object() -> Reader[Object]:
    adapter: TypeAdapter[Object] = TypeAdapter(Object)
    return lambda content, headers: adapter.validate_json(content)


def _then(read: Reader[Any], choose: Callable[[Any], T]) -> Reader[T]:
    return lambda content, headers: choose(read(content, headers))


def _first_model(models: Mapping[str, Any]) -> str:
    return str(models["data"][0]["id"])
