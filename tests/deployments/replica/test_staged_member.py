import asyncio
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.adapters import Adapter, LoadAdapter
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import (
    Body,
    Check,
    Connect,
    Drop,
    FilePart,
    Outcome,
    Receive,
    Staged,
    Verify,
)
from deployments.replica.staged_member import StagedMember
from deployments.replica.worker_calls import answer_calls, open_connection
from deployments.weights.staging.worker_reports import from_wire, to_wire
from tests.deployments.replica.fake_vllm import CHECKS, DONE, FakeLlm, staged_member
from tests.deployments.replica.round_instructions import COMMIT, receive

LOAD = LoadAdapter(adapter=Adapter(adapter_id=1, name="a", version=1, path="/a", digest="d", size_bytes=1))
PART = FilePart(
    directory="/c", path="/c/m.safetensors", names=("w",), dtypes=("F32",), shapes=((2,),), ranges=((0, 8),)
)


async def test_workers_read_files_without_a_connection(member: StagedMember, llm: FakeLlm) -> None:
    for _ in range(2):
        await member.execute(Receive(round_id=1, payload=PART, retain_version=4))
    read = llm.named("staging_read")
    assert [(each["begins"], each["retain_version"]) for each in read] == [(True, 4), (False, 4)]
    assert all(from_wire(FilePart, each["part"]) == PART for each in read)
    assert llm.named("staging_receive") == []
    await member.execute(Verify(round_id=1))
    await member.execute(COMMIT)
    assert member.version == 4 and member.retained_version == 4


@pytest.mark.parametrize("body", [Connect(init_info={}), receive(), LOAD], ids=lambda body: body.name)
async def test_error_is_the_payloads_only_while_the_engine_lives(
    member: StagedMember, llm: FakeLlm, body: Body
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
    staged = await member.execute(Verify(round_id=1))
    assert staged == Staged(
        digest="aa",
        size_bytes=200,
        stage_s=0.75,
        verify_s=0.1,
        checks=CHECKS,
    )
    assert member.staged_round == 1


async def test_replica_reports_only_checks_of_all_workers(member: StagedMember, llm: FakeLlm) -> None:
    llm.states[1] = replace(DONE, checks=(Check.NAMES, Check.FINITE))
    await member.execute(receive())
    staged = await member.execute(Verify(round_id=1))
    assert isinstance(staged, Staged) and staged.checks == (Check.NAMES, Check.FINITE)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.REJECTED, PayloadRejected),
        (Outcome.TRANSFER_FAILED, TransferFailed),
        (Outcome.REPLICA_FAILED, PayloadRejected),
    ],
)
async def test_failure_of_one_worker_fails_the_replica(
    member: StagedMember, llm: FakeLlm, outcome: Outcome, error: type[Exception]
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
        await member.execute(Verify(round_id=1))


async def test_missing_peer_is_a_failed_transfer(member: StagedMember, llm: FakeLlm) -> None:
    llm.connects = replace(llm.connects, outcome=Outcome.TRANSFER_FAILED, message="1 of 3 came")
    with pytest.raises(TransferFailed, match="1 of 3 came"):
        await member.execute(Connect(init_info={}))


async def test_commit_of_a_dropped_round_fails(member: StagedMember) -> None:
    await member.execute(receive())
    await member.execute(Drop(round_id=1))
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
    llm.states[0] = replace(DONE, outcome=Outcome.REJECTED, message="wrong")
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
