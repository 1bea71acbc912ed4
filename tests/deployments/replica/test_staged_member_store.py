import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.protocol.errors import PayloadRejected
from deployments.protocol.poll import CatchUp, Forget, StoreResult, Verify, WriteVersion
from deployments.replica.host_store import HostStore
from deployments.replica.staged_member import StagedMember
from deployments.replica.worker_calls import WorkerCalls
from deployments.weights.staging.worker_reports import to_wire
from deployments.weights.store.owner import claim
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store
from tests.deployments.replica.fake_vllm import FakeLlm
from tests.deployments.replica.round_instructions import COMMIT, receive
from tests.waiting import reached

KEEP = WriteVersion(version=4, label="l", directory="", fleet_id="f", digest="aa")


@pytest.mark.slow
async def test_watch_of_a_write_can_be_cancelled(member: StagedMember, llm: FakeLlm) -> None:
    """Also if the cancellation comes in the moment in which a worker has answered."""
    write = WriteVersion(version=4, label=None, directory="/store", fleet_id="f", digest=None)
    asked = asyncio.Event()

    async def workers(method: str, **arguments: Any) -> list[Any]:
        asked.set()
        return [None, None]

    member._engine.workers = workers  # type: ignore[method-assign]
    member._engine.calls = WorkerCalls(workers)
    await member.execute(write)
    asked.clear()
    watching = member._watching
    assert watching is not None
    await asked.wait()
    watching.cancel()
    await asyncio.wait({watching}, timeout=2)
    assert watching.cancelled()


async def test_stored_version_is_no_longer_retained(member: StagedMember, llm: FakeLlm) -> None:
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    llm.stored = StoreResult(version=4, label="l", path="/store/v4", problem="")
    write = WriteVersion(version=4, label="l", directory="/store", fleet_id="f", digest="aa")
    await member.execute(write)
    assert llm.named("staging_store") == [{"body": to_wire(write)}]
    await member.execute(Forget(version=3))
    assert member.retained_version == 4, "an older one is not what it retains"
    await member.execute(Forget(version=4))
    assert member.retained_version is None


async def test_one_replica_of_a_host_keeps_a_commit_in_its_own_store(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    own, other = HostStore(tmp_path / "store", 3), HostStore(tmp_path / "store", 3)
    member.host_store = own
    written = {"body": to_wire(replace(KEEP, directory=str(own.directory)))}
    assert other.prepare("f"), "another replica was first"
    for kept in ([], [written]):
        await member.execute(receive(retain=4))
        await member.execute(Verify(round_id=1))
        await member.execute(replace(COMMIT, keep=KEEP))
        assert member._keeping is not None
        await member._keeping
        assert llm.named("staging_store") == kept
        if other._lock is not None:
            os.close(other._lock)  # it exits
            other._lock = None


async def test_a_host_that_cannot_keep_a_version_commits_it(
    member: StagedMember, llm: FakeLlm, tmp_path: Path
) -> None:
    claim(tmp_path, "another-fleet", tmp_path)
    member.host_store = HostStore(tmp_path, 3)
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    await member.execute(replace(COMMIT, keep=KEEP))
    assert member._keeping is not None
    await member._keeping
    assert member.version == 4 and not llm.named("staging_store")


@pytest.mark.slow
async def test_failed_write_can_be_retried(member: StagedMember, llm: FakeLlm) -> None:
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    write = WriteVersion(version=4, label="l", directory="/store", fleet_id="f", digest="aa")
    for problem in ("disk full", ""):
        llm.stored = None
        await member.execute(write)
        assert member.store_result is None and member.is_writing, "nothing is known of this attempt"
        llm.stored = StoreResult(version=4, label="l", path="", problem=problem)
        await reached(lambda: member.store_result == llm.stored and not member.is_writing)


@pytest.mark.parametrize("intact", [True, False])
async def test_only_an_intact_stored_version_is_loaded(
    member: StagedMember, llm: FakeLlm, tmp_path: Path, intact: bool
) -> None:
    committed = CommittedVersion(version=4, label=None, tensors={"w": torch.zeros(3)})
    path = write_version(committed, Store(tmp_path), lambda directory: None)
    catch_up = CatchUp(version=4, path=str(path))
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
    committed = CommittedVersion(version=4, label=None, tensors={"w": torch.zeros(3)})
    path = write_version(committed, Store(tmp_path), lambda directory: None)
    llm.reload_refusal = "vLLM's GptOssForCausalLM copies weights past its loaders"
    with pytest.raises(PayloadRejected, match="copies weights past its loaders"):
        await member.execute(CatchUp(version=4, path=str(path)))
    assert member.version == 3 and not llm.named("load_checkpoint")
