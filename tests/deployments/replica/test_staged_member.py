import asyncio
import errno
import os
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from deployments.protocol import poll
from deployments.protocol.adapters import Adapter, LoadAdapter
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.replica.host_store import HostStore
from deployments.replica.member import StagedMember
from deployments.replica.worker_calls import answer_calls, open_connection
from deployments.weights.staging.staged_update import from_wire, to_wire
from deployments.weights.store.owner import OWNER, claim, own
from deployments.weights.store.versions import Store
from tests.deployments.replica.fake_vllm import CHECKS, DONE, FakeLlm, staged_member
from tests.deployments.replica.round_instructions import COMMIT, receive
from tests.deployments.version_holder import FLEET, write
from tests.waiting import reached

LOAD = LoadAdapter(adapter=Adapter(adapter_id=1, name="a", version=1, path="/a", digest="d", size_bytes=1))
PART = poll.FilePart(
    directory="/c", path="/c/m.safetensors", names=("w",), dtypes=("F32",), shapes=((2,),), ranges=((0, 8),)
)


async def test_workers_read_files_without_a_connection(member: StagedMember, llm: FakeLlm) -> None:
    for _ in range(2):
        await member.execute(poll.Receive(round_id=1, payload=PART, retain_version=4))
    read = llm.named("staging_read")
    assert [(each["begins"], each["retain_version"]) for each in read] == [(True, 4), (False, 4)]
    assert all(from_wire(poll.FilePart, each["part"]) == PART for each in read)
    assert llm.named("staging_receive") == []
    await member.execute(poll.Verify(round_id=1))
    await member.execute(COMMIT)
    assert member.version == 4 and member.retained_version == 4


@pytest.mark.parametrize("body", [poll.Connect(init_info={}), receive(), LOAD], ids=lambda body: body.name)
async def test_error_is_the_payloads_only_while_the_engine_lives(
    member: StagedMember, llm: FakeLlm, body: poll.Body
) -> None:
    llm.vllm_config.lora_config = object()
    llm.broken = OverflowError("int too big")
    with pytest.raises(PayloadRejected, match="OverflowError: int too big"):
        await member.execute(body)
    llm.errored = True
    with pytest.raises(OverflowError):
        await member.execute(body)


async def test_staging_share_applies_only_while_requests_run(member: StagedMember, llm: FakeLlm) -> None:
    await member.execute(receive())
    llm.busy = True
    await member.execute(receive())
    assert [each["share"] for each in llm.named("staging_receive")] == [1.0, 0.25]


async def test_staged_report_sums_the_workers(member: StagedMember, llm: FakeLlm) -> None:
    llm.states[1] = replace(DONE, stage_s=0.75)
    await member.execute(receive())
    staged = await member.execute(poll.Verify(round_id=1))
    assert staged == poll.Staged(digest="aa", size_bytes=200, stage_s=0.75, verify_s=0.1, checks=CHECKS)
    assert member.staged_round == 1


async def test_replica_reports_only_checks_of_all_workers(member: StagedMember, llm: FakeLlm) -> None:
    llm.states[1] = replace(DONE, checks=(poll.Check.NAMES, poll.Check.FINITE))
    await member.execute(receive())
    staged = await member.execute(poll.Verify(round_id=1))
    assert isinstance(staged, poll.Staged) and staged.checks == (poll.Check.NAMES, poll.Check.FINITE)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (poll.Outcome.REJECTED, PayloadRejected),
        (poll.Outcome.TRANSFER_FAILED, TransferFailed),
        (poll.Outcome.REPLICA_FAILED, PayloadRejected),
    ],
)
async def test_failure_of_one_worker_fails_the_replica(
    member: StagedMember, llm: FakeLlm, outcome: poll.Outcome, error: type[Exception]
) -> None:
    llm.states[1] = replace(DONE, outcome=outcome, message="what happened")
    with pytest.raises(error, match=r"what happened$"):
        await member.execute(receive())


async def test_workers_that_staged_different_tensors_reject_the_round(
    member: StagedMember, llm: FakeLlm
) -> None:
    llm.states[1] = replace(DONE, digest="bb")
    await member.execute(receive())
    with pytest.raises(PayloadRejected, match=r"staged different tensors: \['aa', 'bb'\]"):
        await member.execute(poll.Verify(round_id=1))


async def test_missing_peer_is_a_failed_transfer(member: StagedMember, llm: FakeLlm) -> None:
    llm.connects = replace(llm.connects, outcome=poll.Outcome.TRANSFER_FAILED, message="1 of 3 came")
    with pytest.raises(TransferFailed, match="1 of 3 came"):
        await member.execute(poll.Connect(init_info={}))


async def test_commit_of_a_dropped_round_fails(member: StagedMember) -> None:
    await member.execute(receive())
    await member.execute(poll.Drop(round_id=1))
    with pytest.raises(RuntimeError, match=r"^round 1 is not verified; staged is None$"):
        await member.execute(COMMIT)


class DirectLlm(FakeLlm):
    """Its workers answer beside the engine, as `answer_calls` does in a worker's thread."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.ends = [threading.Event() for _ in range(workers)]  # of what each stages
        self.connections: list[socket.socket] = []

    def answers(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        if method != "answer_calls_at":
            return super().answers(method, arguments)
        for index, end in enumerate(self.ends):
            self.connections.append(open_connection(Path(arguments["path"])))
            methods = {"staging_progress": partial(self.progress, index, end)}
            threading.Thread(target=answer_calls, args=(self.connections[-1], methods), daemon=True).start()
        return [True] * len(self.ends)

    def progress(self, index: int, end: threading.Event, wait_s: float) -> dict[str, Any]:
        return to_wire(replace(self.states[index], payloads_done=int(end.wait(wait_s))))


async def receiving(llm: DirectLlm) -> asyncio.Task[Any]:
    member = staged_member(llm)
    await member._engine.calls.connect()
    return asyncio.create_task(member.execute(receive()))


async def test_receive_ends_when_the_last_worker_has_staged() -> None:
    llm = DirectLlm(workers=2)
    task = await receiving(llm)
    llm.states[0] = replace(DONE, outcome=poll.Outcome.REJECTED, message="wrong")
    llm.ends[0].set()
    await asyncio.sleep(0.01)
    assert not task.done(), "one worker has not staged the payload"
    llm.ends[1].set()
    with pytest.raises(PayloadRejected, match="wrong"):
        await asyncio.wait_for(task, 5)
    assert llm.named("staging_progress") == [], "a call through vLLM delays a decoding step"


async def test_dead_engine_ends_the_wait_for_progress() -> None:
    llm = DirectLlm(workers=2)
    task = await receiving(llm)
    await asyncio.sleep(0.01)
    llm.connections[1].shutdown(socket.SHUT_RDWR)
    await asyncio.wait_for(task, 5)
    assert llm.named("staging_progress"), "a call, which raises with the real engine"


# -- what it stores and loads -----------------------------------------------------------------------


KEEP = poll.WriteVersion(version=4, label="l", fleet_id="f", digest=None)
LOCK_POLL_S = 0.02


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCK_POLL_S", "STORE_RETRY_S", "STORE_POLL_S"):
        monkeypatch.setattr(f"deployments.replica.member.{name}", LOCK_POLL_S)


def store_at(directory: Path, *, shared: bool = True) -> HostStore:
    own(directory, "f")
    return HostStore(directory, keep=None if shared else 3)


async def commit(member: StagedMember, version: int = 4) -> None:
    number = version - 3
    await member.execute(replace(receive(retain=version), round_id=number))
    await member.execute(poll.Verify(round_id=number))
    keep = replace(KEEP, version=version)
    await member.execute(replace(COMMIT, round_id=number, version=version, keep=keep))


def ended(directory: Path, problem: str = "", version: int = 4) -> poll.StoreResult:
    path = "" if problem else str(Store(directory).path(version))
    return poll.StoreResult(version=version, label="l", path=path, problem=problem)


async def test_a_committed_version_is_written_reported_and_freed(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    member.store = store_at(tmp_path)
    await commit(member)
    assert (member.version, member.retained_version, member.is_writing) == (4, 4, True)
    await reached(lambda: bool(llm.named("staging_store_state")))
    assert llm.named("staging_store") == [{"body": to_wire(KEEP), "directory": str(tmp_path)}]
    assert member.store.lock("f") is None, "no other replica writes meanwhile"
    llm.stored = ended(tmp_path)
    await reached(lambda: member.retained_version is None)
    assert member.store_result == llm.stored and not member.is_writing
    assert llm.named("staging_forget") == [{"version": 4}]
    lock = member.store.lock("f")
    assert lock is not None
    os.close(lock)


async def test_another_replica_writes_when_the_writer_exits(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    member.store = store_at(tmp_path)
    lock = member.store.lock("f")
    assert lock is not None
    await commit(member)
    await asyncio.sleep(5 * LOCK_POLL_S)
    assert not llm.named("staging_store") and member.is_writing, "it may have to"
    os.close(lock)
    await reached(lambda: bool(llm.named("staging_store")))


async def test_what_another_replica_has_written_is_reported_and_freed(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    """Also if its writer could not report it, and before the directory is seen on this host."""
    member.store = store_at(tmp_path)
    lock = member.store.lock("f")
    assert lock is not None
    await commit(member)
    member.store.unlock(lock, KEEP)
    await reached(lambda: member.retained_version is None)
    assert member.store_result == ended(tmp_path) and not llm.named("staging_store")


async def test_a_replica_that_cannot_write_frees_what_another_one_has_written(
    member: StagedMember, llm: FakeLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has mounted the store for reading."""
    member.store, other = store_at(tmp_path), store_at(tmp_path)
    monkeypatch.setattr(member.store, "lock", MagicMock(side_effect=OSError(errno.EROFS, "Read-only")))
    await commit(member)
    await reached(lambda: member.store_result is not None)
    assert member.store_result is not None and "Read-only" in member.store_result.problem
    lock = other.lock("f")
    assert lock is not None
    other.unlock(lock, KEEP)
    await reached(lambda: member.retained_version is None)
    assert member.store_result == ended(tmp_path)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_version_that_cannot_be_written_is_reported_served_and_tried_again(
    member: StagedMember, llm: FakeLlm, tmp_path: Path, shared: bool
) -> None:
    claim(tmp_path, "another-fleet", tmp_path)
    member.store = HostStore(tmp_path, None if shared else 3)
    await commit(member)
    await reached(lambda: member.store_result is not None)
    assert member.store_result is not None and "another-fleet" in member.store_result.problem
    assert member.version == 4 and not member.is_writing and not llm.named("staging_store")
    (tmp_path / OWNER).unlink()
    store_at(tmp_path)
    await reached(lambda: bool(llm.named("staging_store")))
    llm.stored = ended(tmp_path, "OSError: disk full")
    await reached(lambda: member.store_result == llm.stored)
    llm.stored = ended(tmp_path)
    await reached(lambda: member.retained_version is None)


async def test_no_store_is_begun_where_its_disk_is_not_mounted(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    member.store = HostStore(tmp_path, keep=None)
    await commit(member)
    await reached(lambda: member.store_result is not None)
    assert not list(tmp_path.iterdir())


async def test_a_disk_that_hangs_frees_the_lock(
    member: StagedMember, llm: FakeLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica.member.WRITE_S", 0.1)
    monkeypatch.setattr("deployments.replica.member.STORE_RETRY_S", 60.0)
    member.store = store_at(tmp_path)
    await commit(member)
    await reached(lambda: member.store_result is not None)
    assert member.store_result == ended(tmp_path, "TimeoutError: did not end within 0.1 s")
    lock = member.store.lock("f")
    assert lock is not None
    os.close(lock)


async def test_a_newer_version_follows_the_one_that_is_being_written(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    member.store = store_at(tmp_path)
    await commit(member, 4)
    await reached(lambda: bool(llm.named("staging_store")))
    await commit(member, 5)
    await commit(member, 6)
    llm.stored = ended(tmp_path)
    await reached(lambda: len(llm.named("staging_store")) == 2)
    assert member.store_result == ended(tmp_path) and member.retained_version == 6
    assert [each["body"]["version"] for each in llm.named("staging_store")] == [4, 6]
    llm.stored = ended(tmp_path, version=6)
    await reached(lambda: member.retained_version is None)


@pytest.mark.parametrize("intact", [True, False])
async def test_only_an_intact_stored_version_is_loaded(
    member: StagedMember, llm: FakeLlm, tmp_path: Path, intact: bool
) -> None:
    path = write(tmp_path, {"w": torch.zeros(3)}, 4)
    catch_up = poll.CatchUp(stored=poll.StoredVersion(version=4, path=str(path), fleet_id=FLEET))
    if intact:
        load, removed = member._engine.load, list[bool]()

        async def loading(*arguments: Any) -> None:
            removed.append(Store(tmp_path).remove(4))  # by the replica of this host that writes
            await load(*arguments)

        member._engine.load = loading  # type: ignore[method-assign]
        await member.execute(catch_up)
        assert (member.version, removed) == (4, [False])
        assert Store(tmp_path).remove(4)
        return
    save_file({"w": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(PayloadRejected, match=r"version 4 in .* is damaged: 'w' was written with digest"):
        await member.execute(catch_up)
    assert member.version == 3 and not llm.named("load_checkpoint")


async def test_model_that_vllm_cannot_reload_is_refused(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    path = write(tmp_path, {"w": torch.zeros(3)}, 4)
    llm.reload_refusal = "vLLM's GptOssForCausalLM copies weights past its loaders"
    with pytest.raises(PayloadRejected, match="copies weights past its loaders"):
        stored = poll.StoredVersion(version=4, path=str(path), fleet_id=FLEET)
        await member.execute(poll.CatchUp(stored=stored))
    assert member.version == 3 and not llm.named("load_checkpoint")
