"""`FakeReplica`, over the engine that the simulation uses too, does what the real members do.

Each case says what the real member answers. After each instruction everything that can be seen of the fake is
what is seen of the real member; random sequences look for what no case has thought of.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from pydantic import JsonValue

from deployments.protocol import poll
from deployments.protocol.adapters import LoadAdapter, SetAdapters
from deployments.protocol.engine_state import Disconnect, InFlight, Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import Body, Directive, Instruction, Outcome, Report
from deployments.replica.follower import Follower
from deployments.replica.member import EngineMember, StagedMember
from deployments.replica.native_member import NativeMember
from deployments.replica.server_arguments import EngineSpec
from deployments.weights.wire.chunk_layout import describe
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.replica.adapter_llm import CONFIG, adapter
from tests.deployments.replica.fake_vllm import FakeEngine, FakeLlm
from tests.deployments.version_holder import FLEET, write
from tests.tiny_adapters import save_tiny_adapter

FIRST_VERSION = 3
LIMIT_S = 10.0
SPEC = EngineSpec(model="no/such/directory", served_model_name="m", backend="ipc", staging="none")


def payload(round_id: int) -> JsonValue:
    """One that all of them can read: a version of one tensor, in one part."""
    sent: dict[str, JsonValue] = dict(describe([("w", torch.float32, (2,))]))
    return sent | {"attempt": f"round {round_id}", "part": 0, "parts": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the controller and a client can see of a replica after a directive.

    Attributes:
        begins: whether a request that is admitted would be begun; None if its weights are uncertain.
    """

    outcomes: Sequence[Outcome]  # of the directive's instructions, in order
    version: int
    staged_round: int | None
    retained_version: int | None
    drains: Sequence[str]
    adapters: Sequence[int]
    admitted: bool
    fenced: bool
    begins: bool | None


class Subject(AbstractAsyncContextManager["Subject", None]):
    """A replica under test, which has sent its first report once it is entered."""

    report: Report

    @abstractmethod
    async def deliver(self, directive: Directive) -> None:
        """Answer its report; returns with the next one."""

    @property
    @abstractmethod
    def admitted(self) -> bool: ...

    @property
    @abstractmethod
    def begins(self) -> bool: ...

    async def tell(
        self, *bodies: Body, first_seq: int, admitted: bool = True, fenced: str | None = None
    ) -> Seen:
        """Deliver instructions in one directive. A `first_seq` that was used before: they come again."""
        instructions = [
            Instruction(seq=first_seq + index, body=body, deadline_s=5.0) for index, body in enumerate(bodies)
        ]
        before = tuple(each.seq for each in self.report.acknowledgements)
        await self.deliver(
            Directive(admitted=admitted, instructions=instructions, acknowledged=before, fenced=fenced)
        )
        report = self.report
        outcomes = tuple(each.outcome for each in report.acknowledgements if each.seq not in before)
        failed = Outcome.REPLICA_FAILED in outcomes
        return Seen(
            outcomes=outcomes,
            version=report.version,
            staged_round=report.staged_round,
            retained_version=report.retained_version,
            drains=() if report.draining is None else tuple(report.draining.drain_ids),
            adapters=report.adapters,
            admitted=self.admitted,
            fenced=report.fenced,
            begins=None if failed or report.fenced else self.begins,
        )


class Following(Subject):
    """A member behind the real follower."""

    def __init__(self, member: EngineMember) -> None:
        self._member = member
        self._directives: asyncio.Queue[Directive] = asyncio.Queue()
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._follower = Follower(
            replica_id="r", incarnation="r-1", member=member, poll=self._poll, heartbeat_s=60.0, retry_s=0.01
        )

    async def _poll(self, report: Report) -> Directive:
        self._reports.put_nowait(report)
        return await self._directives.get()

    async def __aenter__(self) -> Subject:
        self._running = asyncio.create_task(self._follower.run())
        self.report = await asyncio.wait_for(self._reports.get(), LIMIT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    async def deliver(self, directive: Directive) -> None:
        self._directives.put_nowait(directive)
        coming = asyncio.create_task(self._reports.get())
        done, _ = await asyncio.wait(
            {coming, self._running}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert done, "neither a report nor the end of the follower"
        if coming in done:
            self.report = coming.result()
        else:  # it has said that it is fenced, and says nothing more
            coming.cancel()

    @property
    def admitted(self) -> bool:
        return self._member.admitted


class OverEngine(Following):
    """A real member, over an engine whose vLLM is a fake."""

    def __init__(self, *, in_place: bool, llm: FakeLlm | None = None) -> None:
        self._llm = FakeLlm() if llm is None else llm
        engine = FakeEngine(self._llm, FastAPI(), FIRST_VERSION)  # type: ignore[arg-type]
        member: EngineMember = StagedMember(engine)
        if in_place:
            member = NativeMember(engine, SPEC, one_payload=False)
        super().__init__(member)

    @property
    def begins(self) -> bool:
        return self._llm.begins


class Fake(Subject):
    def __init__(self, *, in_place: bool) -> None:
        self._replica = FakeReplica(
            replica_id="r",
            incarnation="r-1",
            version=FIRST_VERSION,
            updates_in_place=in_place,
            retains=not in_place,
            writes_at_once=False,
        )
        self.report = self._replica.report()

    async def __aexit__(self, *_: object) -> None:
        pass

    async def deliver(self, directive: Directive) -> None:
        self._replica.take(directive)
        self.report = self._replica.report()

    @property
    def admitted(self) -> bool:
        return self._replica.admitted

    @property
    def begins(self) -> bool:
        return self._replica.begins


STORED_VERSION = 9


def caught_up(path: str) -> poll.CatchUp:
    return poll.CatchUp(stored=poll.StoredVersion(version=STORED_VERSION, path=path, fleet_id=FLEET))


CATCH_UP = caught_up("")
Kind = type[Fake] | type[OverEngine]
BOTH = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in_place"])
ANSWERS = {
    poll.Outcome.DONE: "d",
    poll.Outcome.REJECTED: "r",
    poll.Outcome.TRANSFER_FAILED: "t",
    poll.Outcome.REPLICA_FAILED: "F",
}


def receive(round_id: int) -> poll.Receive:
    return poll.Receive(round_id=round_id, payload=payload(round_id), retain_version=FIRST_VERSION + round_id)


def commit(round_id: int, *, hold: bool = False) -> poll.Commit:
    return poll.Commit(
        round_id=round_id,
        version=FIRST_VERSION + round_id,
        hold=hold,
        kv_cache=poll.KvCache.RECOMPUTE,
        in_flight=InFlight.KEEP,
    )


R1, V1, C1, D1 = receive(1), poll.Verify(round_id=1), commit(1), poll.Drop(round_id=1)
R2, V2, C2, D2 = receive(2), poll.Verify(round_id=2), commit(2), poll.Drop(round_id=2)
H1, RELEASE = commit(1, hold=True), poll.Release(round_id=1)
LEAVE, CONNECT = poll.Drop(round_id=None), poll.Connect(init_info={})
DRAIN, END_DRAIN, DRAIN_1 = (
    poll.Drain(drain_id="a"),
    poll.EndDrain(drain_id="a"),
    poll.Drain(drain_id=poll.drain_of_round(1)),
)
PAUSE, RESUME, SLEEP, SLEEP_0, WAKE, DISCONNECT = (
    poll.RunOperation(operation=each)
    for each in (Pause(), Resume(), Sleep(), Sleep(level=0), WakeUp(), Disconnect())
)
WAKE_WEIGHTS = poll.RunOperation(operation=WakeUp(tags=(SleepTag.WEIGHTS,)))
WAKE_CACHE = poll.RunOperation(operation=WakeUp(tags=(SleepTag.KV_CACHE,)))

# What is told, what a staged member answers, what one does that updates in place.
CASES: dict[str, tuple[Sequence[poll.Body], str, str]] = {
    "a round": ([CONNECT, R1, V1, C1, RELEASE], "ddddd", "ddddd"),
    "a round that holds": ([R1, V1, H1, RELEASE, RELEASE], "ddddd", "ddddd"),
    "two rounds": ([R1, V1, C1, R2, V2, C2], "dddddd", "dddddd"),
    "an empty round": ([V1], "r", "r"),
    "verified twice": ([R1, V1, V1, C1], "dddd", "ddF"),
    "committed twice": ([R1, V1, H1, H1, RELEASE, C1], "dddddd", "dddddd"),
    "released early": ([R1, RELEASE, V1, C1], "dddd", "dddd"),
    "a commit out of nothing": ([C1], "F", "F"),
    "a commit of what is not verified": ([R1, C1], "dF", "dF"),
    "a commit of another round": ([R1, V1, C2], "ddF", "ddF"),
    "a commit of what is dropped": ([R1, V1, D1, C1], "dddF", "ddF"),
    "another round's verification": ([R1, V2], "dr", "dr"),
    "dropped twice": ([D1, LEAVE, R1, D1, D1, R2, V2, C2], "dddddddd", "dddF"),
    "a new controller while a round is received": ([R1, R2, V2, C2], "dddd", "dF"),
    "a new controller while a round is verified": ([R1, V1, R2], "ddd", "ddF"),
    "a new publisher while a round is received": ([R1, CONNECT, V1, R2, V2, C2], "ddrddd", "dddF"),
    "a publisher that leaves while a round is received": ([R1, DISCONNECT, R2, V2, C2], "ddddd", "dF"),
    "paused over a commit": ([PAUSE, R1, V1, C1, PAUSE, RESUME, RESUME], "ddddddd", "ddddddd"),
    "paused while held": ([R1, V1, H1, PAUSE, RELEASE, RESUME], "dddddd", "dddddd"),
    "drained while held": ([R1, V1, H1, DRAIN, RELEASE, END_DRAIN], "dddddd", "dddddd"),
    "resumed while held": ([R1, V1, H1, RESUME, RELEASE], "ddddd", "ddddd"),
    "asleep": ([SLEEP, R1, WAKE_WEIGHTS, R1, V1, C1, WAKE_CACHE], "drddddd", "drddddd"),
    "asleep before the commit": ([R1, V1, SLEEP, C1], "dddF", "dddd"),
    "asleep before a stored version": ([SLEEP, CATCH_UP], "dF", "dF"),
    "woken twice": ([SLEEP, SLEEP, WAKE, WAKE, SLEEP_0, SLEEP, WAKE_CACHE, WAKE], "dddddddd", "dddddddd"),
    "woken while held": ([R1, V1, H1, SLEEP, WAKE, RELEASE], "dddddd", "dddddd"),
    "a pause and a sleep": ([PAUSE, SLEEP, RESUME, WAKE, PAUSE, SLEEP, WAKE], "ddddddd", "ddddddd"),
    "drained twice": ([DRAIN, DRAIN, DRAIN_1, END_DRAIN, END_DRAIN, R1, V1, C1], "d" * 8, "d" * 8),
    "drained and paused": ([DRAIN, PAUSE, END_DRAIN, DRAIN, RESUME, END_DRAIN], "d" * 6, "d" * 6),
    "drained and asleep": ([SLEEP, DRAIN, WAKE, END_DRAIN, DRAIN, SLEEP, END_DRAIN, WAKE], "d" * 8, "d" * 8),
    "a stored version": ([CATCH_UP] * 2, "dd", "dd"),
    "a stored version while held": (
        [R1, V1, H1, PAUSE, CATCH_UP, RESUME],
        "dddddd",
        "dddddd",
    ),
    "retained twice": ([R1, V1, C1, R2, V2, D2], "d" * 6, "dddddF"),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("store"), {"w": torch.zeros(2)}, STORED_VERSION))


def at(stored: str, body: poll.Body) -> poll.Body:
    return caught_up(stored) if isinstance(body, poll.CatchUp) else body


async def seen_of(subject: Subject, bodies: Sequence[poll.Body]) -> list[Seen]:
    """What is seen after each instruction, and after all of them have come again; ends with a failure."""
    async with subject:
        seen = []
        for seq, body in enumerate(bodies):
            seen.append(await subject.tell(body, first_seq=seq))
            if seen[-1].begins is None:
                break
        again = await subject.tell(*bodies[: len(seen)], first_seq=0)
        assert again.outcomes == (), "instructions that come again are ignored"
        return [*seen, again] if seen[-1].begins is not None else seen


def answers(seen: Sequence[Seen]) -> str:
    return "".join(ANSWERS[outcome] for each in seen for outcome in each.outcomes)


@BOTH
@pytest.mark.parametrize("case", CASES)
async def test_outcomes_of_the_real_members_and_of_their_fake(case: str, in_place: bool, stored: str) -> None:
    bodies, *expected = CASES[case]
    told = [at(stored, body) for body in bodies]
    seen = await seen_of(OverEngine(in_place=in_place), told)
    assert answers(seen) == expected[in_place]
    assert await seen_of(Fake(in_place=in_place), told) == seen, "the fake's"


@pytest.mark.slow
@BOTH
async def test_random_instructions_do_not_tell_fake_and_member_apart(in_place: bool, stored: str) -> None:
    bodies = [R1, R1, R2, V1, V1, V2, C1, H1, C2, D1, D2, RELEASE, CONNECT, DISCONNECT]
    bodies += [DRAIN, END_DRAIN, DRAIN_1, PAUSE, RESUME, SLEEP, SLEEP_0, WAKE, WAKE_WEIGHTS, WAKE_CACHE]
    bodies += [caught_up(stored)]
    rng = Random(1)
    for _ in range(300):
        drawn = rng.choices(bodies, k=12)
        # Whether the same tensors may come twice is up to what stages them, which is not here.
        told = [
            each
            for i, each in enumerate(drawn)
            if not isinstance(each, poll.Receive) or each not in drawn[:i]
        ]
        expected = await seen_of(OverEngine(in_place=in_place), told)
        assert await seen_of(Fake(in_place=in_place), told) == expected, [each.name for each in told]


class LoraLlm(FakeLlm):
    """Has adapters beside a model whose schema is not known here."""

    def __init__(self) -> None:
        super().__init__()
        self.vllm_config.lora_config = CONFIG
        self.vllm_config.load_config = SimpleNamespace(download_dir=None)
        self.model_config = SimpleNamespace(model="no/such/directory", revision=None)
        self.loaded: set[int] = set()

    def answers(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        return [True] if method == "adapter_is_read" else super().answers(method, arguments)

    async def add_lora(self, request: Any) -> None:
        assert request.lora_int_id not in self.loaded, "vLLM would keep the former one"
        self.loaded.add(request.lora_int_id)

    async def remove_lora(self, adapter_id: int) -> None:
        self.loaded.remove(adapter_id)


@pytest.mark.slow
@BOTH
async def test_random_loads_of_adapters_do_not_tell_fake_and_member_apart(
    in_place: bool, tmp_path: Path
) -> None:
    one, two = (adapter(save_tiny_adapter(tmp_path / str(number), number), number) for number in (1, 2))
    bodies: list[poll.Body] = [LoadAdapter(adapter=one), LoadAdapter(adapter=two)] * 4
    for live, keep in (([], ()), ([], (1, 2)), ([one], (2,)), ([two], ()), ([one, two], ()), ([one], (3,))):
        bodies.append(SetAdapters(live=live, keep=keep))
    bodies += [R1, V1, C1, H1, RELEASE, PAUSE, RESUME, SLEEP, WAKE]
    rng = Random(1)
    answered = set[str]()
    for _ in range(60):
        told = rng.choices(bodies, k=12)
        told = [each for i, each in enumerate(told) if each is not R1 or R1 not in told[:i]]
        llm = LoraLlm()
        expected = await seen_of(OverEngine(in_place=in_place, llm=llm), told)
        assert await seen_of(Fake(in_place=in_place), told) == expected, told
        assert llm.loaded == {*expected[-1].adapters}
        answered |= {*answers(expected)}
    assert answered == {"d", "r", "F"}


@BOTH
@pytest.mark.parametrize("kind", [Fake, OverEngine])
async def test_fence_is_permanent(kind: Kind, in_place: bool) -> None:
    async with kind(in_place=in_place) as subject:
        assert (await subject.tell(R1, first_seq=0)).admitted
        fenced = await subject.tell(V1, first_seq=1, fenced="silent for too long")
        assert fenced.fenced and not fenced.admitted and fenced.outcomes == (), "nothing is carried out"
        later = await subject.tell(V1, C1, first_seq=2)
        assert later.fenced and not later.admitted and later.outcomes == ()
        assert later.version == FIRST_VERSION


@BOTH
@pytest.mark.parametrize("kind", [Fake, OverEngine])
async def test_admission_is_the_controllers(kind: Kind, in_place: bool) -> None:
    async with kind(in_place=in_place) as subject:
        assert not (await subject.tell(first_seq=0, admitted=False)).admitted
        assert (await subject.tell(first_seq=0)).admitted


class FaultyLlm(FakeLlm):
    """Raises in one of the calls that reach the engine, before or after it was carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.fails_in = -1
        self.carried_out = False
        self.error: BaseException = RuntimeError()

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        number, self.asked = self.asked, self.asked + 1
        if number == self.fails_in and not self.carried_out:
            raise self.error
        answers = await super().collective_rpc(method, kwargs)
        if number == self.fails_in:
            raise self.error
        return answers


ERRORS = [
    OSError(28, "No space left on device"),
    UnicodeEncodeError("utf-8", "\udce9", 0, 1, "surrogates not allowed"),
    RuntimeError("worker failed"),
    TimeoutError("no answer"),
    PayloadRejected("wrong"),
    TransferFailed("a peer is gone"),
    asyncio.CancelledError(),
]
# Each ends with the instruction in which calls fail.
BEFORE_A_COMMIT: dict[str, Sequence[poll.Body]] = {
    "connect": [CONNECT],
    "connect, with a leftover": [R1, CONNECT],
    "the first payload": [CONNECT, R1],
    "another payload": [R1, R1],
    "a payload, with a leftover": [R1, R2],
    "verify": [R1, V1],
    "drop": [R1, D1],
    "drop of what is verified": [R1, V1, D1],
    "leave": [CONNECT, LEAVE],
}


@pytest.mark.parametrize("case", BEFORE_A_COMMIT)
async def test_no_error_before_a_commit_fails_the_replica_and_the_next_round_commits(case: str) -> None:
    *before, faulty = BEFORE_A_COMMIT[case]
    for error, carried_out in product(ERRORS, (False, True)):
        call, calls = 0, 1
        while call < calls:
            llm = FaultyLlm()
            async with OverEngine(in_place=False, llm=llm) as subject:
                await subject.tell(*before, first_seq=0)
                llm.error, llm.carried_out, llm.fails_in = error, carried_out, llm.asked + call
                first = llm.asked
                seen = await subject.tell(faulty, first_seq=10)
                calls = max(calls, llm.asked - first)
                where = f"{error!r} in call {call} of {faulty.name}"
                [outcome] = seen.outcomes or [None]
                assert outcome is not None, f"{where}: no acknowledgement, so its deadline fences it"
                assert outcome is not poll.Outcome.REPLICA_FAILED, where
                assert seen.admitted and seen.begins, where
                again = await subject.tell(D1, CONNECT, R2, V2, C2, first_seq=20)
                assert answers([again]) == "ddddd", where
                assert again.version == FIRST_VERSION + 2
            call += 1
