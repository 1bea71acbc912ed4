"""The ledger in time: its decisions made durable, its deadlines checked, its pending calls awaited.

    call     changes the ledger ─► publish: decisions to the journal, then wake everything that waits
    ticker   deadlines, leases, and whether the processes of silent members still exist

A call changes the ledger and makes its decisions durable within one step of the event loop, so nobody can
learn of a decision that is not on disk. If the disk fails, nothing is answered any more and the health check
fails: the next process recovers from what is written.
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
        self._journal = Journal(state_dir)
        self._ledger.recover(self._journal.recovered, clock())
        self._journal.append(self._ledger.take_decisions())
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
                self._ledger.tick(self._clock())
                self.publish()
                await self._check_silent()
            except Exception:  # the ticker enforces every deadline: it must go on
                logger.exception("controller tick failed")

    async def _check_silent(self) -> None:
        for replica_id, incarnation in self._ledger.silent_since(self._clock() - self._silent_s):
            if not await asyncio.to_thread(self._is_alive, replica_id):
                self._ledger.lost(replica_id, incarnation, "its process is gone", self._clock())
                self.publish()

    async def aclose(self) -> None:
        """Stop the ticker and close the journal."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._journal.close()
