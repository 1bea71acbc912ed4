"""A replica as Serve starts it: with which weights, and when it is ready."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch

from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import JoinAnswer, Unloadable
from deployments.replica import replica
from deployments.replica.replica import Replica, find_first_weights
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store


class Answers:
    """A controller's answers, one after the other."""

    def __init__(self, *answers: JoinAnswer | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[Unloadable | None] = []

    async def __call__(self, unloadable: Unloadable | None) -> JoinAnswer:
        self.asked.append(unloadable)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def stored(tmp_path: Path, version: int) -> JoinAnswer:
    committed = CommittedVersion(version=version, label=None, tensors={"w": torch.ones(2)})
    path = write_version(committed, Store(tmp_path), lambda directory: None)
    return JoinAnswer(version=version, path=str(path))


async def test_pinned_version_is_loaded(tmp_path: Path) -> None:
    ask = Answers(FleetUnavailable("not yet"), stored(tmp_path, 4))
    answer = await find_first_weights(ask, ask_again_s=0)
    assert answer.version == 4 and ask.asked == [None, None]


async def test_join_without_an_answer_is_repeated(tmp_path: Path) -> None:
    answers = Answers(stored(tmp_path, 4))

    async def ask(unloadable: Unloadable | None) -> JoinAnswer:
        if not answers.asked:
            answers.asked.append(unloadable)
            await asyncio.Event().wait()
        return await answers(unloadable)

    answer = await asyncio.wait_for(find_first_weights(ask, ask_again_s=0, join_s=0.01), 10)
    assert answer.version == 4 and answers.asked == [None, None]


async def test_missing_version_is_reported_with_its_reason(tmp_path: Path) -> None:
    gone = JoinAnswer(version=61, path=str(tmp_path / "v00000061"))
    ask = Answers(gone, stored(tmp_path, 64))
    assert (await find_first_weights(ask, ask_again_s=0)).version == 64
    reason = f"version 61 must be in {tmp_path / 'v00000061'}, and there is none"
    assert ask.asked == [None, Unloadable(version=61, reason=reason)]


async def test_damaged_version_is_refused_and_the_initial_checkpoint_loaded(
    tmp_path: Path,
) -> None:
    damaged, start = stored(tmp_path, 4), JoinAnswer(version=0, path=None)
    file = Path(str(damaged.path)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    ask = Answers(damaged, start)
    assert await find_first_weights(ask, ask_again_s=0) == start
    refused = ask.asked[1]
    assert refused is not None and refused.reason.startswith("version 4 in ") and "damaged" in refused.reason


AROUND = (
    "serve ray CallHandle own_engine warn_if_not_forked add_server_info watch_load Follower RequestAdmission "
    "ReplicaFront HttpServer"
)


async def test_replica_loads_the_committed_version_and_is_ready_when_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve ends the replicas that it replaces as soon as their successors are ready."""
    for name in AROUND.split():
        monkeypatch.setattr(replica, name, MagicMock())
    member = SimpleNamespace(admitted=False, fenced=None)
    start = AsyncMock(return_value=MagicMock(dead=False))
    monkeypatch.setattr(replica, "ReplicaEngine", SimpleNamespace(start=start))
    monkeypatch.setattr(replica, "member_of", lambda engine, spec: member)
    stored = JoinAnswer(version=3, path="/store/v3")
    monkeypatch.setattr(replica, "find_first_weights", AsyncMock(return_value=stored))
    started: Any = SimpleNamespace(_join=None, _follow=asyncio.Event().wait)
    started.check_health = partial(Replica.check_health, started)
    started._until_admitted = partial(Replica._until_admitted, started)
    spec = MagicMock()
    starting = asyncio.create_task(cast(Any, Replica.__init__)(started, spec, MagicMock()))
    await asyncio.sleep(0.1)
    start.assert_awaited_once_with(spec.at("/store/v3"), version=3)
    assert not starting.done()
    member.admitted = True
    await asyncio.wait_for(starting, 10)
    started._following.cancel()
