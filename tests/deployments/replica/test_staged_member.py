"""What a staged member asks of its workers, and what it makes of their reports."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.errors import PayloadRejected, TransferFailed
from deployments.protocol.adapters import ReceiveAdapter
from deployments.protocol.files import FilePart
from deployments.protocol.instructions import (
    CatchUp,
    Commit,
    Connect,
    Drop,
    Forget,
    KvCache,
    Receive,
    StagingOptions,
    Verify,
    WriteVersion,
)
from deployments.protocol.operations import InFlight
from deployments.protocol.reports import Check, Outcome, Staged, StoreResult, Swapped
from deployments.replica.staged_member import StagedMember
from deployments.weights.staging.reports import ConnectState, from_wire
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store
from tests.deployments.replica.fake_workers import CHECKS, DONE, Workers

ADAPTER = ReceiveAdapter(load_id="1" * 32, payload={"x": 1})


def receive(round_id: int = 1, retain: int | None = None) -> Receive:
    return Receive(round_id=round_id, payload={"x": 1}, options=StagingOptions(retain_version=retain))


PART = FilePart(
    directory="/c", path="/c/m.safetensors", names=("w",), dtypes=("F32",), shapes=((2,),), ranges=((0, 8),)
)


async def test_files_are_read_by_the_workers_and_need_no_connection(
    member: StagedMember, engine: Workers
) -> None:
    for _ in range(2):
        await member.execute(Receive(round_id=1, payload=PART, options=StagingOptions(retain_version=4)))
    read = engine.named("staging_read")
    assert [(each["begins"], each["retain_version"]) for each in read] == [(True, 4), (False, 4)]
    assert all(from_wire(FilePart, each["part"]) == PART for each in read)
    assert engine.named("staging_receive") == [] and len(engine.named("staging_report_to")) == 1
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    assert engine.version == 4 and member.retained_version == 4


COMMIT = Commit(round_id=1, version=4, hold=True, kv_cache=KvCache.RECOMPUTE, in_flight=InFlight.KEEP)


@pytest.fixture
def engine() -> Workers:
    return Workers()


@pytest.fixture
def member(engine: Workers) -> StagedMember:
    return StagedMember(engine)  # type: ignore[arg-type]


async def test_the_first_payload_of_a_round_begins_the_update(member: StagedMember, engine: Workers) -> None:
    await member.execute(receive(retain=4))
    await member.execute(receive(retain=4))
    assert [(each["begins"], each["retain_version"]) for each in engine.named("staging_receive")] == [
        (True, 4),
        (False, 4),
    ]
    await member.execute(Drop(round_id=1))
    await member.execute(receive(round_id=2))
    assert engine.named("staging_receive")[-1]["begins"], "another round begins its own"


async def test_what_is_left_of_a_round_that_a_new_controller_never_heard_of_is_discarded(
    member: StagedMember, engine: Workers
) -> None:
    """A round that was being received says nothing of itself in a report, so nobody has it dropped."""
    await member.execute(receive(round_id=7))
    assert member.staged_round is None
    await member.execute(receive(round_id=8))
    assert [name for name, _ in engine.calls if name in ("staging_receive", "staging_drop")] == [
        "staging_receive",
        "staging_drop",
        "staging_receive",
    ]


async def test_an_adapter_is_received_into_this_hosts_memory(member: StagedMember, engine: Workers) -> None:
    await member.execute(ADAPTER)
    [arguments] = engine.named("staging_receive_files")
    assert arguments["payload"] == {"x": 1} and engine.named("staging_progress")
    place = Path(arguments["directory"])
    place.mkdir()
    assert engine.adapters.reader.begun == [ADAPTER.load_id], "read before its load comes"
    await member.execute(ADAPTER)
    assert not place.exists(), "the same again: what was there goes before"


async def test_an_adapter_is_not_received_beside_what_is_left_of_a_round(
    member: StagedMember, engine: Workers
) -> None:
    await member.execute(receive())
    await member.execute(ADAPTER)
    names = [name for name, _ in engine.calls if name in ("staging_drop", "staging_receive_files")]
    assert names == ["staging_drop", "staging_receive_files"]
    with pytest.raises(PayloadRejected, match="round 1 has brought no payload"):
        await member.execute(Verify(round_id=1))


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.REJECTED, PayloadRejected),
        (Outcome.TRANSFER_FAILED, TransferFailed),
        (Outcome.REPLICA_FAILED, RuntimeError),
    ],
)
async def test_one_worker_without_the_adapter_is_a_replica_without_it(
    member: StagedMember, engine: Workers, outcome: Outcome, error: type[Exception]
) -> None:
    engine.states[1] = replace(DONE, outcome=outcome, message="what happened")
    with pytest.raises(error, match=r"^what happened$"):
        await member.execute(ADAPTER)


async def test_the_end_of_a_write_is_watched_until_somebody_cancels(
    member: StagedMember, engine: Workers
) -> None:
    """Also if the cancellation comes in the moment in which a worker has answered."""
    write = WriteVersion(version=4, label=None, directory="/store", fleet_id="f", digest=None)
    asked = asyncio.Event()

    async def workers(method: str, **arguments: Any) -> list[Any]:
        asked.set()
        return [None, None]

    engine.workers = workers  # type: ignore[method-assign]
    await member.execute(write)
    asked.clear()
    watching = member._watching
    assert watching is not None
    await asked.wait()
    watching.cancel()
    await asyncio.wait({watching}, timeout=2)
    assert watching.cancelled()


async def test_staging_takes_its_share_only_beside_requests(member: StagedMember, engine: Workers) -> None:
    await member.execute(receive())
    engine.busy = True
    await member.execute(receive())
    assert [each["share"] for each in engine.named("staging_receive")] == [1.0, 0.25]


async def test_a_verified_version_is_the_workers_sum(member: StagedMember) -> None:
    await member.execute(receive())
    staged = await member.execute(Verify(round_id=1))
    assert staged == Staged(
        digest="aa",
        compared=True,
        size_bytes=200,
        stage_s=0.75,
        verify_s=0.1,
        checks=CHECKS,
        by_name=True,
    )
    assert member.staged_round == 1


async def test_what_one_worker_did_not_check_the_replica_did_not(
    member: StagedMember, engine: Workers
) -> None:
    engine.states[1] = replace(DONE, checks=(Check.NAMES, Check.FINITE))
    await member.execute(receive())
    staged = await member.execute(Verify(round_id=1))
    assert isinstance(staged, Staged) and not staged.compared, "a sender that states no digests"
    assert staged.checks == (Check.NAMES, Check.FINITE) and staged.by_name


async def test_a_round_without_a_payload_is_rejected(member: StagedMember, engine: Workers) -> None:
    await member.execute(receive())
    with pytest.raises(PayloadRejected, match="round 2 has brought no payload"):
        await member.execute(Verify(round_id=2))
    assert member.staged_round is None


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.REJECTED, PayloadRejected),
        (Outcome.TRANSFER_FAILED, TransferFailed),
        (Outcome.REPLICA_FAILED, RuntimeError),
    ],
)
async def test_one_workers_failure_is_the_replicas(
    member: StagedMember, engine: Workers, outcome: Outcome, error: type[Exception]
) -> None:
    engine.states[1] = replace(DONE, outcome=outcome, message="what happened")
    with pytest.raises(error, match=r"^what happened$"):
        await member.execute(receive())


async def test_workers_that_staged_different_tensors_fail_the_replica(
    member: StagedMember, engine: Workers
) -> None:
    engine.states[1] = replace(DONE, digest="bb")
    await member.execute(receive())
    with pytest.raises(RuntimeError, match=r"staged different tensors: \['aa', 'bb'\]"):
        await member.execute(Verify(round_id=1))


async def test_a_peer_that_did_not_come_to_the_rendezvous_is_no_failure_of_the_replica(
    member: StagedMember, engine: Workers
) -> None:
    engine.connects = ConnectState(done=True, outcome=Outcome.TRANSFER_FAILED, message="1 of 3 came")
    with pytest.raises(TransferFailed, match="1 of 3 came"):
        await member.execute(Connect(init_info={}))


async def test_a_commit_that_comes_again_is_answered_from_what_is_live(
    member: StagedMember, engine: Workers
) -> None:
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    assert await member.execute(COMMIT) == Swapped(swap_s=0.01, gap_s=0.02)
    assert await member.execute(COMMIT) == Swapped(swap_s=0.0, gap_s=0.0)
    assert (engine.version, member.retained_version, member.staged_round) == (4, 4, None)


async def test_a_commit_without_its_staging_fails(member: StagedMember) -> None:
    await member.execute(receive())
    await member.execute(Drop(round_id=1))
    with pytest.raises(RuntimeError, match=r"^expected round 1, verified; staged is None$"):
        await member.execute(COMMIT)


async def test_what_the_store_has_is_not_retained(member: StagedMember, engine: Workers) -> None:
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    engine.stored = StoreResult(version=4, label="l", path="/store/v4", problem="")
    await member.execute(WriteVersion(version=4, label="l", directory="/store", fleet_id="f", digest="aa"))
    assert engine.named("staging_store") == [
        {"version": 4, "label": "l", "directory": "/store", "fleet_id": "f", "digest": "aa"}
    ]
    await member.execute(Forget(version=3))
    assert member.retained_version == 4, "an older one is not what it retains"
    await member.execute(Forget(version=4))
    assert member.retained_version is None


async def test_a_write_that_failed_can_be_tried_again(member: StagedMember, engine: Workers) -> None:
    await member.execute(receive(retain=4))
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    write = WriteVersion(version=4, label="l", directory="/store", fleet_id="f", digest="aa")
    for problem in ("disk full", ""):
        engine.stored = None
        await member.execute(write)
        assert member.store_result is None, "nothing is known of this attempt"
        engine.stored = StoreResult(version=4, label="l", path="", problem=problem)
        async with asyncio.timeout(5):
            while member.store_result != engine.stored:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("intact", [True, False])
async def test_a_stored_version_is_loaded_only_if_it_is_intact(
    member: StagedMember, engine: Workers, tmp_path: Path, intact: bool
) -> None:
    committed = CommittedVersion(version=4, label=None, tensors={"w": torch.zeros(3)})
    path = write_version(committed, Store(tmp_path), lambda directory: None)
    catch_up = CatchUp(version=4, path=str(path))
    if intact:
        await member.execute(catch_up)
        assert engine.version == 4
        return
    save_file({"w": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(PayloadRejected, match=r"version 4 in .* is damaged: 'w' was written with digest"):
        await member.execute(catch_up)
    assert engine.version == 3 and not engine.named("load")


async def test_a_model_that_vllm_would_not_reload_whole_is_not_loaded_into(
    member: StagedMember, engine: Workers, tmp_path: Path
) -> None:
    committed = CommittedVersion(version=4, label=None, tensors={"w": torch.zeros(3)})
    path = write_version(committed, Store(tmp_path), lambda directory: None)
    engine.reload_refusal = "vLLM's GptOssForCausalLM copies weights past its loaders"
    with pytest.raises(PayloadRejected, match="copies weights past its loaders"):
        await member.execute(CatchUp(version=4, path=str(path)))
    assert engine.version == 3 and not engine.named("load")
