"""A member and a controller that follow a script, for the follower."""

import asyncio

from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import Body, Directive, Drop, Instruction, Outcome, Report, Value


class Member:
    """Implements `MemberProtocol`; what an instruction does is scripted by its payload."""

    partially_updated = False

    def __init__(self, act: str = "") -> None:
        self.act = act
        self.ran: list[str] = []
        self.admitted = False
        self.fenced = ""
        self.interrupted, self.dead, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def report(self, replica_id: str, incarnation: str) -> Report:
        return Report(
            replica_id=replica_id, incarnation=incarnation, version=3, world_size=1, staged_round=None
        )

    async def died(self) -> str:
        await self.dead.wait()
        return "its engine has died"

    async def execute(self, body: Body) -> Value:
        self.ran.append(body.name)
        match self.act if not isinstance(body, Drop) else "":
            case "reject":
                raise PayloadRejected("no such tensor")
            case "lose a peer":
                raise TransferFailed("a peer is gone")
            case "fail":
                raise RuntimeError("broken")
            case "wait for ever":
                await asyncio.Event().wait()
            case "hang" | "cannot be interrupted":
                await self.interrupted.wait()
                raise PayloadRejected("interrupted")
            case "engine hangs":
                await asyncio.Event().wait()
            case "takes long":
                await self.may_end.wait()
        return None

    async def interrupt(self) -> None:
        if self.act == "engine hangs":  # then a call to it has no answer
            await asyncio.Event().wait()
        if self.act == "cannot be interrupted":
            raise RuntimeError("the staging cannot be dropped")
        self.interrupted.set()

    def on_directive(self, directive: Directive) -> None:
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
        seen = tuple(each.seq for each in report.acknowledgements)
        if not self._turns:
            return Directive(admitted=False, acknowledged=seen, fenced="the end")
        turn = self._turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return Directive(admitted=True, instructions=turn, acknowledged=seen)

    @property
    def outcomes(self) -> dict[int, tuple[Outcome, str]]:
        return {a.seq: (a.outcome, a.message) for r in self.reports for a in r.acknowledgements}
