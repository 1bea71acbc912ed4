"""Calls of our routes, and of the few of vLLM's that our programs need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import JsonValue, TypeAdapter

from app.client.connection import Call, Reader
from deployments.protocol import responses
from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.publishing import RoundReport
from trainers.trajectory import Trajectory

T = TypeVar("T")
Object = dict[str, JsonValue]


@dataclass
class _Tokens:
    tokens: list[int]


def health() -> Call[responses.Health]:
    """Fails with status 503 while no replica serves."""
    return _get("/health", responses.Health)


def fleet() -> Call[responses.FleetStatus]:
    return _get("/fleet", responses.FleetStatus)


def rounds() -> Call[Sequence[RoundReport]]:
    """Ended rounds, oldest first."""
    return _get("/fleet/rounds", responses.History, lambda made: made.rounds)


def load() -> Call[responses.FleetLoad]:
    return _get("/fleet/load", responses.FleetLoad)


def adapters() -> Call[Sequence[AdapterStatus]]:
    return _get("/fleet/adapters", responses.AdapterList, lambda made: made.adapters)


def publish_directory(path: str, label: str | None = None) -> Call[RoundReport]:
    """Publish a checkpoint directory that is visible on every replica's host, or what is at a URL."""
    body = {"path": path} if label is None else {"path": path, "label": label}
    return _post("/fleet/publish", body, RoundReport, repeatable=False)


def abort_update(round_id: int) -> Call[None]:
    """Give up a round of `/start_weight_update`."""
    body = {"round_id": round_id}
    return Call(method="POST", path="/abort_weight_update", body=body, read=lambda content, headers: None)


def rollback(version: int) -> Call[RoundReport]:
    return _post("/fleet/rollback", {"version": version}, RoundReport, repeatable=False)


def scale(replicas: int | Literal["auto"]) -> Call[responses.SizeStatus]:
    return _post("/fleet/scale", {"replicas": replicas}, responses.SizeStatus)


def pause(mode: Literal["keep", "wait", "abort"] | None = None) -> Call[responses.Status]:
    """`mode` None: the fleet's default for running requests."""
    query = {} if mode is None else {"mode": mode}
    return Call(method="POST", path="/pause", query=query, read=typed(responses.Status))


def resume() -> Call[responses.Status]:
    return Call(method="POST", path="/resume", read=typed(responses.Status))


def world_size() -> Call[int]:
    return _get("/get_world_size", responses.WorldSize, lambda made: made.world_size)


def disconnect() -> Call[None]:
    """Close the fleet's end of a transfer."""
    return Call(method="POST", path="/shutdown_weight_transfer_engine", read=lambda content, headers: None)


# -- rollouts ----------------------------------------------------------------------------------------


def run_position(run: str) -> Call[responses.RunPosition]:
    return _get(f"/rollouts/runs/{run}", responses.RunPosition)


def begin_groups(run: str, number: int, count: int) -> Call[responses.Status]:
    return _post("/rollouts/begin", {"run": run, "number": number, "count": count}, responses.Status)


def settle_groups(groups: Sequence[Mapping[str, JsonValue]]) -> Call[responses.Status]:
    """Close groups. Each is a `group`, the `rollouts` that are learned from (`id`, `reward`, `info`), and a
    `reason` if there are none."""
    return _post("/rollouts/settle", {"groups": list(groups)}, responses.Status)


def take(
    step: str, run: str, groups: int, max_staleness: int | None, offset: int = 0
) -> Call[responses.TakenStep]:
    """The groups that a step consumes, from `offset` on; the same ones again for the same step."""
    body = {"step": step, "run": run, "groups": groups, "max_staleness": max_staleness, "offset": offset}
    return _post("/rollouts/take", body, responses.TakenStep)


def rollout_image(digest: str) -> Call[bytes]:
    return Call(method="GET", path=f"/rollouts/images/{quote(digest, safe='')}", read=lambda body, _: body)


# -- the trainer -----------------------------------------------------------------------------------


def step(
    trajectories: Sequence[Trajectory],
    settings: str | None = None,
    done: int | None = None,
    label: str | None = None,
) -> Call[Object]:
    """One optimizer step; `settings` is JSON of `trainers.settings.StepSettings`. Refused unless the trainer
    has done `done` optimizer steps, or has made the step of this label, whose metrics it returns."""
    from trainers.trajectory_arrays import MEDIA_TYPE, to_bytes  # numpy is slow to import

    given = {"done": None if done is None else str(done), "label": label}
    return Call(
        method="POST",
        path="/train/step",
        query={name: value for name, value in given.items() if value is not None},
        content=to_bytes(trajectories, settings),
        headers={"content-type": MEDIA_TYPE},
        read=typed(Object),
        repeatable=False,
    )


def publish(
    label: str | None = None, step: int | None = None, after: int | None = None
) -> Call[RoundReport | responses.AdapterReport]:
    """The trainer's weights or adapter. Refused unless it has done `step` optimizer steps, and unless its own
    version, or `after`, is committed."""
    given = {"label": label, "step": step, "after": after}
    body = {name: value for name, value in given.items() if value is not None}
    return _post("/train/publish", body, RoundReport | responses.AdapterReport, repeatable=False)


def report_step(
    run: str, step: int, values: Mapping[str, float], rollouts: Sequence[responses.RolloutSample] = ()
) -> Call[responses.Status]:
    samples = [asdict(each) for each in rollouts]
    body = {"run": run, "step": step, "values": dict(values), "rollouts": samples}
    return _post("/train/report", body, responses.Status)


def save(path: str | None = None) -> Call[responses.SavedCheckpoint]:
    """`path` None: the trainer chooses a directory on its host."""
    body = {} if path is None else {"path": path}
    return _post("/train/save", body, responses.SavedCheckpoint, repeatable=False)


def train_status() -> Call[responses.TrainerStatus]:
    return _get("/train/status", responses.TrainerStatus)


# -- vLLM's ----------------------------------------------------------------------------------------


def model() -> Call[str]:
    return _get("/v1/models", Object, lambda models: str(models["data"][0]["id"]))


def tokenize(model: str, prompt: str) -> Call[list[int]]:
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    return _post("/tokenize", body, _Tokens, lambda made: made.tokens)


def tokenize_chat(model: str, messages: Sequence[Mapping[str, str]]) -> Call[list[int]]:
    """With the generation prompt."""
    body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
    return _post("/tokenize", body, _Tokens, lambda made: made.tokens)


# -- reading ---------------------------------------------------------------------------------------


@cache
def typed(kind: Any) -> Reader[Any]:
    """Reads JSON; ignores unknown fields, which a newer fleet may send."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    return lambda content, headers: adapter.validate_json(content)


def _get(path: str, kind: Any, choose: Callable[[Any], Any] | None = None) -> Call[Any]:
    return Call(method="GET", path=path, read=_chosen(kind, choose))


def _post(
    path: str,
    body: Mapping[str, Any],
    kind: Any,
    choose: Callable[[Any], Any] | None = None,
    *,
    repeatable: bool = True,
) -> Call[Any]:
    read = _chosen(kind, choose)
    return Call(method="POST", path=path, body=dict(body), read=read, repeatable=repeatable)


def _chosen(kind: Any, choose: Callable[[Any], Any] | None) -> Reader[Any]:
    read = typed(kind)
    return read if choose is None else lambda content, headers: choose(read(content, headers))
