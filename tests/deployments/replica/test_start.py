import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import DEFAULT, AsyncMock, MagicMock

import pytest
import torch

from deployments.protocol.errors import JournalError
from deployments.protocol.poll import InitialWeights, JoinAnswer, StoredVersion, Unloadable
from deployments.replica import replica
from deployments.replica.replica import Replica, find_first_weights
from deployments.replica.server_arguments import EngineSpec
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from deployments.weights.store.versions import Store
from tests.deployments.version_holder import FLEET, write
from tests.fake_hub import FakeHub
from tests.waiting import reached


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


def told(path: Path, version: int) -> JoinAnswer:
    return JoinAnswer(stored=StoredVersion(version=version, path=str(path), fleet_id=FLEET))


def stored(tmp_path: Path, version: int) -> JoinAnswer:
    return told(write(tmp_path, {"w": torch.ones(2)}, version), version)


UNUSED = InitialCheckpoint("/no/such/model")


async def test_join_without_an_answer_is_repeated(tmp_path: Path) -> None:
    answers = Answers(stored(tmp_path, 4))

    async def ask(unloadable: Unloadable | None) -> JoinAnswer:
        if not answers.asked:
            answers.asked.append(unloadable)
            await asyncio.Event().wait()
        return await answers(unloadable)

    answer, _ = await asyncio.wait_for(find_first_weights(ask, UNUSED, ask_again_s=0, join_s=0.01), 10)
    assert answer.version == 4 and answers.asked == [None, None]


async def test_missing_version_is_reported_with_its_reason(tmp_path: Path) -> None:
    gone = told(tmp_path / "v00000061", 61)
    ask = Answers(gone, stored(tmp_path, 64))
    assert (await find_first_weights(ask, UNUSED, ask_again_s=0))[0].version == 64
    reason = f"version 61 must be in {tmp_path / 'v00000061'}, and there is none"
    assert ask.asked == [None, Unloadable(version=61, reason=reason)]


async def test_damaged_version_is_refused_and_the_initial_checkpoint_loaded(tmp_path: Path) -> None:
    damaged, start = stored(tmp_path, 4), JoinAnswer()
    assert damaged.stored is not None
    file = Path(damaged.stored.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    ask = Answers(damaged, start)
    assert await find_first_weights(ask, UNUSED, ask_again_s=0) == (start, None)
    refused = ask.asked[1]
    assert refused is not None and refused.reason.startswith("version 4 in ") and "damaged" in refused.reason


async def test_overwritten_directory_is_not_loaded_as_version_0_until_it_is_restored(tmp_path: Path) -> None:
    (file := tmp_path / "model.safetensors").write_bytes(b"the first weights")
    joined = JoinAnswer()
    first, _ = await find_first_weights(Answers(joined), InitialCheckpoint(str(tmp_path)))
    first = replace(first, served=True)
    file.write_bytes(b"the other weights")
    other, _ = await find_first_weights(Answers(joined), InitialCheckpoint(str(tmp_path)))
    asked: list[Unloadable | None] = []

    async def ask(unloadable: Unloadable | None) -> JoinAnswer:
        asked.append(unloadable)
        if len(asked) == 3:
            file.write_bytes(b"the first weights")
        return first

    answer, _ = await find_first_weights(ask, InitialCheckpoint(str(tmp_path)), ask_again_s=0)
    assert answer == first
    reason = f"version 0 of this fleet is {first.initial}, and {tmp_path} has {other.initial} here"
    assert asked[0] is None and asked[1] == asked[2] is not None
    assert asked[1].version == 0 and asked[1].reason.startswith(reason)


async def test_replica_that_has_not_what_nobody_serves_fails_with_both_digests(tmp_path: Path) -> None:
    """Serve then says why the fleet cannot be started; else it would start for ever."""
    (tmp_path / "model.safetensors").write_bytes(b"the other weights")
    first = InitialWeights(digest="1" * 32)
    ask = Answers(*[JoinAnswer(initial=first)] * 2)
    with pytest.raises(JournalError, match=f"version 0 of this fleet is {first}, and {tmp_path} has digest"):
        await find_first_weights(ask, InitialCheckpoint(str(tmp_path)), ask_again_s=0)
    assert ask.asked[1] is not None, "the controller was told"


AROUND = (
    "serve ray CallHandle own_engine warn_if_not_forked add_server_info watch_load Follower RequestAdmission "
    "ReplicaFront HttpServer"
)


class Starting:
    """A replica between a controller's answer and an engine, which are fakes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        engine: Any,
        answer: JoinAnswer,
        load: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        for name in AROUND.split():
            monkeypatch.setattr(replica, name, MagicMock())
        self.member = SimpleNamespace(admitted=False, fenced=None, initial=None)
        self.start = AsyncMock(
            return_value=MagicMock(dead=False), side_effect=lambda *_, **__: (load(), DEFAULT)[1]
        )
        monkeypatch.setattr(replica, "ReplicaEngine", SimpleNamespace(start=self.start))
        monkeypatch.setattr(replica, "member_of", lambda engine, spec: self.member)
        started: Any = SimpleNamespace(_join=AsyncMock(return_value=answer), _follow=asyncio.Event().wait)
        started.check_health = partial(Replica.check_health, started)
        started._until_admitted = partial(Replica._until_admitted, started)
        self.replica = started
        options = {"store": ("/store", None)} | options
        self.task = asyncio.create_task(cast(Any, Replica.__init__)(started, engine, MagicMock(), **options))

    async def admit(self) -> None:
        self.member.admitted = True
        await asyncio.wait_for(self.task, 10)
        self.replica._following.cancel()


async def test_replica_loads_the_committed_version_and_is_ready_when_admitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Serve ends the replicas that it replaces as soon as their successors are ready."""
    answer, spec = stored(tmp_path, 3), MagicMock()
    starting = Starting(monkeypatch, spec, answer)
    await reached(lambda: starting.start.await_count > 0)
    assert answer.stored is not None
    starting.start.assert_awaited_once_with(spec.at(answer.stored.path), version=3)
    assert not starting.task.done()
    await starting.admit()


async def test_a_stored_version_stays_while_an_engine_starts_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer, store, removed = stored(tmp_path, 3), Store(tmp_path), list[bool]()
    starting = Starting(monkeypatch, MagicMock(), answer, lambda: removed.append(store.remove(3)))
    await starting.admit()
    assert removed == [False] and store.remove(3)


async def test_replica_whose_hosts_share_no_store_gives_others_its_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = stored(tmp_path, 4)
    starting = Starting(monkeypatch, MagicMock(), answer, store=(str(tmp_path), 2))
    await starting.admit()
    own = starting.member.store
    assert own.directory == tmp_path and starting.member.endpoint.key == starting.replica._front.key
    front: Any = replica.ReplicaFront
    assert front.call_args.kwargs["versions"] is own


def engine_of(model: str, **arguments: Any) -> EngineSpec:
    return EngineSpec(model=model, served_model_name="m", backend="shm", staging="host", arguments=arguments)


async def test_replica_loads_the_commit_that_the_fleet_began_with_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    hub.commits["org/tiny"] = "b" * 40  # the branch has moved
    first = InitialWeights(commit="a" * 40)
    starting = Starting(monkeypatch, engine_of("org/tiny"), JoinAnswer(initial=first))
    await starting.admit()
    starting.start.assert_awaited_once_with(engine_of("org/tiny", revision="a" * 40), version=0)
    assert starting.member.initial == first


async def test_replica_does_not_serve_a_directory_that_was_rewritten_while_its_engine_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (file := tmp_path / "model.safetensors").write_bytes(b"the first weights")
    answer = JoinAnswer()
    starting = Starting(
        monkeypatch, engine_of(str(tmp_path)), answer, load=lambda: file.write_bytes(b"others")
    )
    with pytest.raises(RuntimeError, match=r"model\.safetensors was changed while it was loaded"):
        await starting.admit()


def test_commit_of_the_model_is_not_looked_for_in_the_tokenizers_repository() -> None:
    first = InitialWeights(commit="a" * 40)
    other = engine_of("org/tiny", tokenizer="org/words", revision="v2").at_commit(first)
    assert other.arguments["tokenizer_revision"] == "v2"
    assert engine_of("org/tiny", tokenizer="org/words").at_commit(first).arguments == {
        "tokenizer": "org/words",
        "revision": "a" * 40,
        "tokenizer_revision": "main",
    }
