"""One replica's side of the protocol, whoever plays it: directives in, what it says of itself out."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

import torch
from fastapi import FastAPI
from pydantic import JsonValue

from deployments.protocol.poll import Body, Directive, Instruction, Outcome, Report
from deployments.replica.follower import Follower
from deployments.replica.member import EngineMember
from deployments.replica.native_member import NativeMember
from deployments.replica.server_arguments import EngineSpec
from deployments.replica.staged_member import StagedMember
from deployments.weights.wire.chunk_layout import describe
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.replica.fake_vllm import FakeEngine, FakeLlm

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
