"""The follower against a scripted controller and a member that records; no clock is waited for."""

import asyncio
from typing import Any

import pytest

from deployments.protocol import Directive, Instruction, InstructionKind, Outcome, Report
from deployments.replica import follower as module
from deployments.replica.follower import Broken, Follower, Rejected


class Member:
    """Implements the port; what an instruction does is scripted by its arguments."""

    version, world_size, staged_round = 3, 1, None
    kept_version, store_result = None, None
    torn = False

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.admitted = False
        self.fenced = ""
        self.interrupted = asyncio.Event()

    async def execute(self, instruction: Instruction) -> Any:
        self.ran.append(str(instruction.kind))
        act = instruction.args.get("act")
        if act == "reject":
            raise Rejected("no such tensor")
        if act == "break":
            raise Broken("a peer is gone")
        if act == "fail":
            raise RuntimeError("broken")
        if act == "wait for ever":
            await asyncio.Event().wait()
        if act == "hang":
            await self.interrupted.wait()
            raise Rejected("interrupted")
        return {"seq": instruction.seq}

    async def interrupt(self) -> None:
        self.interrupted.set()

    def admit(self, directive: Directive) -> None:
        self.admitted = directive.admitted

    async def fence(self, reason: str) -> None:
        self.fenced = reason


class Script:
    """A controller that gives one list of instructions a poll, then fences to end the run."""

    def __init__(self, *turns: list[Instruction] | Exception) -> None:
        self._turns = list(turns)
        self.reports: list[Report] = []

    async def __call__(self, report: Report) -> Directive:
        self.reports.append(report)
        heard = tuple(a.seq for a in report.acknowledgements)
        if not self._turns:
            return Directive(admitted=False, committed_version=3, epoch=1, heard=heard, fenced="the end")
        turn = self._turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return Directive(admitted=True, committed_version=3, epoch=1, instructions=turn, heard=heard)

    @property
    def outcomes(self) -> dict[int, tuple[Outcome, str]]:
        return {a.seq: (a.outcome, a.message) for r in self.reports for a in r.acknowledgements}


def tell(seq: int, kind: InstructionKind, deadline_s: float = 5.0, **args: Any) -> Instruction:
    return Instruction(seq=seq, kind=kind, args=args, deadline_s=deadline_s)


async def run(script: Script, *, torn: bool = False) -> Member:
    member = Member()
    member.torn = torn
    made = Follower(replica_id="r", incarnation="i", member=member, poll=script)
    await asyncio.wait_for(made.run(), 10)
    assert member.fenced == "the end"
    return member


async def test_instructions_run_in_order_and_once() -> None:
    begin, receive = tell(1, InstructionKind.BEGIN), tell(2, InstructionKind.RECEIVE)
    member = await run(Script([begin, receive], [receive], [tell(3, InstructionKind.VERIFY)]))
    assert member.ran == ["begin", "receive", "verify"]


async def test_every_report_carries_what_was_not_heard_yet() -> None:
    script = Script([tell(1, InstructionKind.BEGIN)], [])
    await run(script)
    assert [len(report.acknowledgements) for report in script.reports] == [0, 1, 0]
    assert script.outcomes == {1: (Outcome.DONE, "")}


@pytest.mark.parametrize(
    ("act", "outcome", "words"),
    [
        ("reject", Outcome.REJECTED, "no such tensor"),
        ("break", Outcome.BROKEN, "a peer is gone"),
        ("fail", Outcome.FAILED, "RuntimeError: broken"),
    ],
)
async def test_the_outcome_says_whose_fault_it_was(act: str, outcome: Outcome, words: str) -> None:
    script = Script([tell(1, InstructionKind.RECEIVE, act=act)])
    await run(script)
    assert script.outcomes == {1: (outcome, words)}


async def test_a_deadline_before_the_commit_is_not_this_replicas_fault() -> None:
    script = Script([tell(1, InstructionKind.RECEIVE, 0.05, act="hang")])
    await run(script)
    assert script.outcomes[1][0] is Outcome.REJECTED
    assert "receive took longer than 0.05 s" in script.outcomes[1][1]


@pytest.mark.parametrize(("kind", "torn"), [(InstructionKind.COMMIT, False), (InstructionKind.RECEIVE, True)])
async def test_a_deadline_while_live_weights_change_is(kind: InstructionKind, torn: bool) -> None:
    script = Script([tell(1, kind, 0.05, act="hang")])
    await run(script, torn=torn)
    assert script.outcomes[1][0] is Outcome.FAILED


@pytest.mark.parametrize("act", ["hang", "wait for ever"])
async def test_a_drop_overtakes_an_instruction_that_waits_for_a_peer(
    monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Also one that looks for bytes which nobody counts any more once the session is dropped."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    hang, drop = tell(1, InstructionKind.RECEIVE, 60.0, act=act), tell(2, InstructionKind.DROP)
    member = await run(Script([hang], [hang], [hang, drop], [hang, drop]))
    assert member.ran == ["receive", "drop"]


async def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    member = await run(Script(ConnectionError("away"), [tell(1, InstructionKind.BEGIN)]))
    assert member.ran == ["begin"]
