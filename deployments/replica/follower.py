"""The replica's side of the control plane: a long poll, one instruction at a time.

    loop:  report (version, acknowledgements) ──► controller      holds the poll until there is news
           directive (admitted, instructions) ◄──
           run each new instruction; report every `heartbeat_s` while one runs

The controller waits for acknowledgements, with a deadline; the follower for its engine. A DROP interrupts an
instruction that may be waiting for a dead peer. A fence or the engine's death ends every wait here, because
the engine may hang; a last report confirms the fence.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from deployments.host import tracing
from deployments.host.logs import serve_logger
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import (
    BEFORE_COMMIT,
    Acknowledgement,
    Body,
    CatchUp,
    Commit,
    Directive,
    Drop,
    Instruction,
    Outcome,
    Receive,
    Report,
    Value,
)


class MemberProtocol(Protocol):
    @property
    def partially_updated(self) -> bool:
        """Its live weights are changing: any failure now fails the replica."""

    def report(self, replica_id: str, incarnation: str) -> Report:
        pass

    async def execute(self, body: Body) -> Value:
        """Returns the acknowledged value.

        Raises:
            PayloadRejected: the payload is wrong.
            TransferFailed: a peer is gone.
            Exception: this replica failed.
        """

    async def interrupt(self) -> None:
        """End the running instruction's wait; may hang with its engine."""

    def on_directive(self, directive: Directive) -> None:
        """Admission and fence take effect at once."""

    async def fence(self, reason: str) -> None:
        """Stop permanently, even if the engine hangs."""

    async def died(self) -> str:
        pass


HEARTBEAT_S = 1.0
RETRY_S = 0.5
POLL_TIMEOUT_S = 20.0  # longer than the controller lets a poll wait
FENCED_REPORTS = 5  # attempts to confirm a fence; else a missed heartbeat ends the controller's wait
INTERRUPT_S = 10.0  # below the fleet's heartbeat timeout

logger = serve_logger()


class Follower:
    """Reports and runs instructions until it is fenced or cancelled.

    `last_contact`: when the last answered report was sent. The controller counts from its arrival, which is
    later, so it never declares a replica lost that still takes requests.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        incarnation: str,
        member: MemberProtocol,
        poll: Callable[[Report], Awaitable[Directive]],
        heartbeat_s: float = HEARTBEAT_S,
        retry_s: float = RETRY_S,
        interrupt_s: float = INTERRUPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._member = member
        self._poll = poll
        self._heartbeat_s = heartbeat_s
        self._retry_s = retry_s
        self._interrupt_s = interrupt_s
        self._acknowledgements: dict[int, Acknowledgement] = {}
        self._seen: set[int] = set()
        self._fenced: str | None = None
        self._reports = 0
        self._directive: Directive | None = None
        self._failed = ""  # why requests are refused until the fence: mixed weights or a dead engine
        self._death: asyncio.Future[str] | None = None
        self._clock = clock
        self.last_contact = clock()

    async def run(self) -> None:
        death = self._death = asyncio.ensure_future(self._member.died())
        try:
            await self._follow()
        finally:  # fencing stops the engine; that is no death to report
            self._death = None
            death.cancel()
        assert self._fenced is not None
        confirming = asyncio.create_task(self._confirm_fence())
        try:
            await self._member.fence(self._fenced)
            await confirming
        finally:
            confirming.cancel()

    async def _follow(self) -> None:
        while self._fenced is None:
            directive = await self._report()
            if directive is None:
                await asyncio.sleep(self._retry_s)
            elif directive.fenced is None:
                for instruction in directive.instructions:
                    if instruction.seq in self._seen:
                        continue
                    self._seen.add(instruction.seq)
                    if not await self._run(instruction):
                        break

    async def _confirm_fence(self) -> None:
        for _ in range(FENCED_REPORTS):
            if await self._report() is not None:
                return
            await asyncio.sleep(self._retry_s)

    async def send_last_report(self) -> None:
        """Raises when the controller is unreachable."""
        await self._ask(self._state(ended=True))

    async def _ask(self, report: Report) -> Directive:
        async with asyncio.timeout(POLL_TIMEOUT_S):  # TCP does not notice a lost host
            return await self._poll(report)

    async def _report(self) -> Directive | None:
        sent = self._clock()
        polling = asyncio.ensure_future(self._ask(self._state()))
        try:
            if not await self._wait(polling):
                return await self._report()  # the pending poll does not mention the death
            directive = polling.result()
        except Exception as error:  # Serve raises many types for an unreachable controller
            logger.debug("controller not reached: %s", error)
            return None
        finally:
            polling.cancel()
        self.last_contact = sent
        for seq in directive.acknowledged:
            self._acknowledgements.pop(seq, None)
        if self._fenced is not None:  # a fence is permanent, even if a restarted controller has forgotten it
            return directive
        self._fenced, self._directive = directive.fenced, directive
        self._member.on_directive(self._trusted(directive))
        return directive

    async def _wait(self, task: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Whether the task ended in time. The engine's death ends one wait early."""
        watched = {task} if self._death is None else {task, self._death}
        await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._death is not None and self._death.done():
            reason, self._death = self._death.result(), None
            self._distrust(reason)
        return task.done()

    def _distrust(self, reason: str) -> None:
        self._failed = self._failed or reason
        if self._directive is not None:
            self._member.on_directive(self._trusted(self._directive))

    def _trusted(self, directive: Directive) -> Directive:
        return replace(directive, admitted=False) if self._failed else directive

    def _state(self, *, ended: bool = False) -> Report:
        self._reports += 1
        return replace(
            self._member.report(self._replica_id, self._incarnation),
            acknowledgements=tuple(self._acknowledgements.values()),
            number=self._reports,
            failed=self._failed,
            fenced=self._fenced is not None,
            ended=ended,
        )

    async def _run(self, instruction: Instruction) -> bool:
        """False if a fence or a DROP ended it."""
        task = asyncio.create_task(self._execute(instruction))
        interrupted = False
        try:
            while not await self._wait(task, self._heartbeat_s):
                overtaken = await self._overtaken(instruction)
                if self._fenced is not None:
                    return False
                if overtaken and not interrupted:
                    interrupted = await self._interrupt() is None
                    # A dropped receive waits for nothing that counts; its outcome is ignored.
                    if not interrupted or isinstance(instruction.body, Receive):
                        return False
            return not interrupted
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _overtaken(self, running: Instruction) -> bool:
        directive = await self._report()
        if directive is None or not isinstance(running.body, BEFORE_COMMIT):
            return False
        return any(
            isinstance(later.body, Drop) and later.seq not in self._seen
            for later in directive.instructions
            if later.seq > running.seq
        )

    async def _interrupt(self) -> Exception | None:
        """Why the running instruction is not interrupted; TimeoutError: the engine hangs."""
        try:
            await asyncio.wait_for(self._member.interrupt(), self._interrupt_s)
        except Exception as error:  # a dead or hung engine; this or the next instruction reports it
            logger.warning(
                "engine did not interrupt the running instruction: %s: %s", type(error).__name__, error
            )
            return error
        return None

    async def _execute(self, instruction: Instruction) -> None:
        name, outcome, message = instruction.body.name, Outcome.DONE, ""
        value: Value = None
        missing: tuple[int, ...] = ()
        round_id = getattr(instruction.body, "round_id", None)
        trace = None if round_id is None or self._directive is None else self._directive.trace
        try:
            with tracing.span(name, trace, replica=self._replica_id, round=round_id or 0):
                value = await asyncio.wait_for(self._member.execute(instruction.body), instruction.deadline_s)
        except PayloadRejected as error:
            outcome, message = Outcome.REJECTED, str(error)
        except TransferFailed as error:
            outcome, message, missing = Outcome.TRANSFER_FAILED, str(error), error.missing_ranks
        except TimeoutError:
            message = f"{name} took longer than {instruction.deadline_s:g} s"
            outcome = Outcome.REPLICA_FAILED
            # Live weights are untouched: the sender is slow or gone.
            before_commit = isinstance(instruction.body, BEFORE_COMMIT)
            if before_commit and not self._member.partially_updated:
                failure = await self._interrupt()
                if isinstance(failure, TimeoutError):
                    message += ", and its engine does not answer"
                else:
                    outcome = Outcome.REJECTED
                    message += "" if failure is None else f", and was not interrupted: {failure}"
        except Exception as error:  # the controller decides what to do with a failed replica
            outcome, message = Outcome.REPLICA_FAILED, f"{type(error).__name__}: {error}"
        changes_weights = isinstance(instruction.body, Commit | CatchUp) or self._member.partially_updated
        if outcome is Outcome.REPLICA_FAILED and changes_weights:
            self._distrust(f"{name}: {message}")
        self._acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq, outcome=outcome, message=message, value=value, missing_ranks=missing
        )
