"""The replica's side of the control plane: it follows the controller, one instruction at a time.

    loop:  report (version, acknowledgements) ──► controller      waits there: the long poll
           directive (admitted, instructions) ◄──
           run each new instruction; while one runs, report every `HEARTBEAT_S`

Who waits for whom: the controller waits for acknowledgements, with a deadline; the follower waits
for its engine. A DROP overtakes the instruction that is running, because that one may be
waiting for a peer that is dead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from deployments.logs import serve_logger
from deployments.protocol import (
    Acknowledgement,
    Directive,
    Instruction,
    InstructionKind,
    Outcome,
    Report,
    StoreResult,
)

HEARTBEAT_S = 1.0
RETRY_S = 0.5
BEFORE_COMMIT = (
    InstructionKind.CONNECT,
    InstructionKind.BEGIN,
    InstructionKind.RECEIVE,
    InstructionKind.VERIFY,
)

logger = serve_logger()


class Rejected(Exception):
    """The publisher's payload is wrong; this replica is sound."""


class Broken(Exception):
    """The transfer broke; this replica is sound."""


class Member(Protocol):
    """What a follower steers: an engine with its staging."""

    @property
    def version(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def staged_round(self) -> int | None: ...

    @property
    def torn(self) -> bool:
        """Its live weights are being changed: whatever goes wrong now, it is broken."""

    @property
    def kept_version(self) -> int | None: ...

    @property
    def store_result(self) -> StoreResult | None: ...

    async def execute(self, instruction: Instruction) -> Any:
        """Carry out one instruction; the value is acknowledged (JSON types).

        Raises:
            Rejected: the payload is wrong.
            Broken: a peer of the transfer is gone.
            Exception: this replica is broken.
        """

    async def interrupt(self) -> None:
        """Break whatever the running instruction waits for."""

    def admit(self, directive: Directive) -> None:
        """Take requests, or stop taking them."""

    async def fence(self, reason: str) -> None:
        """Stop for good."""


class Follower:
    """Runs until fenced or cancelled.

    Args:
        poll: the controller's long poll; raises when the controller cannot be reached.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        incarnation: str,
        member: Member,
        poll: Callable[[Report], Awaitable[Directive]],
    ) -> None:
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._member = member
        self._poll = poll
        self._acknowledgements: dict[int, Acknowledgement] = {}
        self._seen: set[int] = set()
        self.last_contact = time.monotonic()

    async def run(self) -> None:
        while True:
            directive = await self._report()
            if directive is None:
                await asyncio.sleep(RETRY_S)
            elif directive.fenced is not None:
                await self._member.fence(directive.fenced)
                return
            else:
                self._member.admit(directive)
                await self._run_new(directive)

    async def _report(self) -> Directive | None:
        """One poll; None when the controller cannot be reached (it may be restarting)."""
        report = Report(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            version=self._member.version,
            world_size=self._member.world_size,
            staged_round=self._member.staged_round,
            kept_version=self._member.kept_version,
            store_result=self._member.store_result,
            acknowledgements=tuple(self._acknowledgements.values()),
        )
        try:
            directive = await self._poll(report)
        except Exception as error:  # Serve has a dozen ways to say that the controller is away
            logger.debug("controller not reached: %s", error)
            return None
        self.last_contact = time.monotonic()
        for seq in directive.heard:
            self._acknowledgements.pop(seq, None)
        return directive

    async def _run_new(self, directive: Directive) -> None:
        for instruction in directive.instructions:
            if instruction.seq not in self._seen:
                self._seen.add(instruction.seq)
                if not await self._run_one(instruction):
                    return

    async def _run_one(self, instruction: Instruction) -> bool:
        """Run to the end, reporting meanwhile; False if the controller has something more urgent."""
        task = asyncio.create_task(self._execute(instruction))
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=HEARTBEAT_S)
                if done:
                    return True
                if await self._overtaken(instruction):
                    await self._member.interrupt()
                    # With its session dropped nothing counts any more what it waits for; nobody hears of it.
                    if instruction.kind is not InstructionKind.RECEIVE:
                        await task
                    return False
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _overtaken(self, running: Instruction) -> bool:
        directive = await self._report()
        if directive is None:
            return False
        self._member.admit(directive)
        return directive.fenced is not None or any(
            later.kind is InstructionKind.DROP and later.seq not in self._seen
            for later in directive.instructions
            if later.seq > running.seq
        )

    async def _execute(self, instruction: Instruction) -> None:
        outcome, message, value = Outcome.DONE, "", None
        try:
            value = await asyncio.wait_for(self._member.execute(instruction), instruction.deadline_s)
        except Rejected as error:
            outcome, message = Outcome.REJECTED, str(error)
        except Broken as error:
            outcome, message = Outcome.BROKEN, str(error)
        except TimeoutError:
            message = f"{instruction.kind} took longer than {instruction.deadline_s:g} s"
            outcome = Outcome.FAILED
            # Live weights are untouched: whoever sends is slow or gone.
            if instruction.kind in BEFORE_COMMIT and not self._member.torn:
                outcome = Outcome.REJECTED
                await self._member.interrupt()
        except Exception as error:  # the fleet decides what to do with a replica that says why it failed
            outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
        self._acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq, outcome=outcome, message=message, value=value
        )
