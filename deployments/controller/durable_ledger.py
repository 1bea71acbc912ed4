"""The ledger in time: its decisions made durable, its deadlines checked, its pending calls awaited.

    call     changes the ledger ─► publish: decisions to the journal, then wake everything that waits
    ticker   deadlines, leases, and whether the processes of silent members still exist

A call changes the ledger and makes its decisions durable within one step of the event loop, so nobody can
learn of a decision that is not on disk. While the disk is full, a publisher's call is refused before it
changes the ledger, and serving goes on with the space that the journal has reserved. If the disk fails, or
that space is used up, nothing is answered any more and the health check fails: the next process recovers
from what is written.

All times come from `now`, which knows that time in which this process stood still (a slow fsync, a frozen
machine) is nobody's delay.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.controller.journal import Journal
from deployments.controller.liveness import IsAlive
from deployments.errors import FleetUnavailable
from deployments.ledger.ledger import Ledger
from deployments.ledger.members import PendingCall
from deployments.logs import serve_logger

LOCK_WAIT_S = 10.0  # for a predecessor to end
STALL_S = 2.0  # the ticker runs several times as often

logger = serve_logger()


class DurableLedger:
    """A ledger with a journal, a clock and waiters. See `Controller` for the arguments.

    Raises:
        JournalError: the state directory cannot be used.
    """

    def __init__(
        self,
        ledger: Ledger,
        state_dir: Path,
        *,
        is_alive: IsAlive,
        silent_s: float,
        tick_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._is_alive = is_alive
        self._silent_s = silent_s
        self._tick_s = tick_s
        self._clock = clock
        self._journal = Journal(state_dir, lock_wait_s=LOCK_WAIT_S)
        self._last_now = clock()
        self._ledger.recover(self._journal.recovered, self._last_now)
        self._journal.append(self._ledger.take_decisions())
        self._disk_problem: str | None = None
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def enter(self) -> None:
        """The beginning of every call.

        Raises:
            FleetUnavailable: decisions could not be written.
        """
        if self._failure is not None:
            raise FleetUnavailable(f"the controller cannot write its decisions: {self._failure}")
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def now(self) -> float:
        """The time. Whoever reads it first after a standstill credits it to all who could not be heard."""
        now = self._clock()
        stalled_s, self._last_now = now - self._last_now, now
        if stalled_s > STALL_S:
            if self._ticker is not None:  # else nobody has called since it started
                logger.warning(
                    "the controller stood still for %.1f s: deadlines are put off by it", stalled_s
                )
            self._ledger.credit(stalled_s, now)
        return now

    def check_space(self) -> None:
        """To be asked before a publisher's call is applied.

        Raises:
            FleetUnavailable: the disk has no space for what may follow from it.
        """
        self._reserve()
        if self._disk_problem is not None:
            raise FleetUnavailable(
                f"the controller cannot record updates: {self._disk_problem}; the fleet serves on. "
                "Free space on the disk of 'state_dir'",
                {"disk": self._disk_problem},
            )

    def publish(self) -> None:
        """Make decisions durable, then wake everything that waits.

        Raises:
            FleetUnavailable: decisions could not be written.
        """
        decisions = self._ledger.take_decisions()
        try:
            self._journal.append(decisions)
        except Exception as error:  # whatever it was, the decision is not on the disk
            self._failure = str(error)
            logger.error("decisions lost: %s", error)
            self._journal.close()  # the next process may take over at once
            self.enter()
        self._changed.set()
        self._changed = asyncio.Event()

    async def result(self, call: PendingCall) -> Any:
        """Wait for a pending call; raises its error. The ledger's deadlines bound the wait."""
        self.publish()
        await self.wait(lambda: call.done, None)
        if call.error is not None:
            raise type(call.error)(call.error.message, call.error.detail)
        return call.result

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Until it is true or the time is over; looked at after every change of the ledger."""
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    await self._changed.wait()
                    self.enter()
        except TimeoutError:
            return

    async def _tick_forever(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                self._reserve()
                self._ledger.tick(self.now())
                self.publish()
                await self._check_silent()
            except Exception:  # the ticker enforces every deadline: it must go on
                logger.exception("controller tick failed")

    async def _check_silent(self) -> None:
        for replica_id, incarnation in self._ledger.silent_since(self.now() - self._silent_s):
            if not await asyncio.to_thread(self._is_alive, replica_id):
                self._ledger.lost(replica_id, incarnation, "its process is gone", self.now())
                self.publish()

    def _reserve(self) -> None:
        """Reserve space in the journal; say so when that begins or ceases to be possible."""
        before, self._disk_problem = self._disk_problem, self._journal.reserve()
        if self._disk_problem is not None and before is None:
            logger.error("no space for decisions, publishers are refused: %s", self._disk_problem)
        elif self._disk_problem is None and before is not None:
            logger.warning("there is space for decisions again: publishers are admitted")

    async def aclose(self) -> None:
        """Stop the ticker and close the journal."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._journal.close()
