"""Replicas without engines, for what the control plane costs: each answers every instruction at once."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from deployments.protocol.poll import (
    Acknowledgement,
    Body,
    Commit,
    Directive,
    Outcome,
    Receive,
    Report,
    Staged,
    Swapped,
    Value,
    Verify,
)

DIGEST = "00"


class InstantMember:
    """Implements the follower's `MemberProtocol` without an engine."""

    partially_updated = False

    def __init__(self) -> None:
        self.admitted = False
        self.version = 0
        self.staged_round: int | None = None

    def report(self, replica_id: str, incarnation: str) -> Report:
        return Report(
            replica_id=replica_id,
            incarnation=incarnation,
            version=self.version,
            world_size=1,
            staged_round=self.staged_round,
        )

    def carry_out(self, body: Body) -> Value:
        """One instruction."""
        match body:
            case Receive():
                self.staged_round = None
            case Verify(round_id=round_id):
                self.staged_round = round_id
                return Staged(digest=DIGEST, size_bytes=1, stage_s=0.0, verify_s=0.0)
            case Commit(version=version):
                self.version, self.staged_round = version, None
                return Swapped(swap_s=0.0, gap_s=0.0)
            case _:
                pass
        return None

    async def execute(self, body: Body) -> Value:
        return self.carry_out(body)

    async def interrupt(self) -> None: ...

    def on_directive(self, directive: Directive) -> None:
        self.admitted = directive.admitted

    async def fence(self, reason: str) -> None:
        raise RuntimeError(f"fenced: {reason}")

    async def died(self) -> str:
        await asyncio.Event().wait()
        return "never"


class LedgerFollower:
    """One replica's side of the protocol in the process of the ledger, without faults and waits."""

    def __init__(self, number: int) -> None:
        self.replica_id = f"replica-{number}"
        self._member = InstantMember()
        self._reports: Iterator[int] = count(1)
        self._seen = 0  # the newest instruction
        self._acknowledgements: dict[int, Acknowledgement] = {}

    @property
    def admitted(self) -> bool:
        return self._member.admitted

    def report(self) -> Report:
        return replace(
            self._member.report(self.replica_id, self.replica_id),
            acknowledgements=tuple(self._acknowledgements.values()),
            number=next(self._reports),
        )

    def take(self, directive: Directive) -> None:
        """Carry out what is new."""
        if directive.fenced is not None:
            raise RuntimeError(f"{self.replica_id} is fenced: {directive.fenced}")
        self._member.on_directive(directive)
        for seq in directive.acknowledged:
            self._acknowledgements.pop(seq, None)
        for instruction in directive.instructions:
            if instruction.seq > self._seen:
                self._seen = instruction.seq
                self._acknowledgements[instruction.seq] = Acknowledgement(
                    seq=instruction.seq, outcome=Outcome.DONE, value=self._member.carry_out(instruction.body)
                )
