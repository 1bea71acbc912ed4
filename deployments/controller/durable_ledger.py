"""The ledger in time: its decisions made durable, its deadlines checked, its pending calls awaited.

    call     changes the ledger ─► wakes those whose wait is over ─► answers once its decisions are durable
    disk     decisions to the journal, one write and one sync for all that came meanwhile, in a thread
    ticker   deadlines and leases
    watcher  whether the processes of silent members still exist; ends those that stand still

The event loop never waits for the disk: replicas are heard while it is slow. What is answered waits for every
decision that the answer may depend on, so nobody can learn of a decision that is not on disk. While the disk
is full, a publisher's call is refused before it changes the ledger, and serving goes on with the space that
the journal has reserved. If the disk fails or hangs, or that space is used up, nothing is answered any more
and the health check fails: the next process recovers from what is written.

All times come from `now`, which knows that time in which this process stood still (a frozen machine) is
nobody's delay.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from deployments.controller.disk import Disk
from deployments.controller.journal import Journal
from deployments.controller.liveness import End, IsAlive, Processes
from deployments.controller.log_lines import LogLines
from deployments.controller.waits import Waits
from deployments.errors import FleetUnavailable
from deployments.ledger.decisions import Decision
from deployments.ledger.ledger import Ledger
from deployments.ledger.members import PendingCall
from deployments.logs import serve_logger

LOCK_WAIT_S = 10.0  # for a predecessor to end
STALL_S = 2.0  # the ticker runs several times as often
DISK_S = 60.0  # one write; after that the disk hangs, and the next process may have more luck

T = TypeVar("T")
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
        end: End,
        silent_s: Callable[[], float],
        tick_s: float,
        clock: Callable[[], float],
        disk: Disk | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._processes = Processes(is_alive, end)
        self._silent_s = silent_s
        self._tick_s = tick_s
        self._clock = clock
        self._on_tick = on_tick
        self._log_lines = LogLines()
        self._journal = Journal(state_dir, lock_wait_s=LOCK_WAIT_S, disk=disk)
        self._last_now = clock()
        self._ledger.recover(self._journal.recovered, self._last_now, uuid.uuid4().hex)
        self._journal.append(self._ledger.take_decisions())
        self._disk_problem: str | None = None
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._unwritten: list[Decision] = []
        self._made = self._durable = 0  # decisions of this process; those on disk
        self._writing: asyncio.Task[None] | None = None
        self._waits = Waits()
        self._written = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self._failure: str | None = None

    def enter(self) -> None:
        """The beginning of every call.

        Raises:
            FleetUnavailable: decisions could not be written.
        """
        if self._failure is not None:
            message = f"the controller cannot write its decisions and is being replaced: {self._failure}"
            raise FleetUnavailable(message, {"restarting": True})
        if not self._running:
            loop = asyncio.get_running_loop()
            self._running = [
                loop.create_task(each())
                for each in (self._tick_forever, self._watch_forever, self._keep_disk)
            ]

    def now(self) -> float:
        """The time. Whoever reads it first after a standstill credits it to all who could not be heard."""
        now = self._clock()
        stalled_s, self._last_now = now - self._last_now, now
        if stalled_s > STALL_S:
            if self._running:  # else nobody has called since it started
                logger.warning(
                    "the controller stood still for %.1f s: deadlines are put off by it", stalled_s
                )
            self._ledger.credit(stalled_s, now)
        return now

    async def check_space(self) -> None:
        """To be asked before a publisher's call is applied.

        Raises:
            FleetUnavailable: the disk has no space for what may follow from it.
        """
        if self._disk_problem is not None or not self._journal.has_space:
            await self._reserve()
        if self._disk_problem is not None:
            raise FleetUnavailable(
                f"the controller cannot record updates: {self._disk_problem}; the fleet serves on. "
                "Free space on the disk of 'state_dir'",
                {"disk": self._disk_problem},
            )

    def change(self, *, wake: bool = True) -> int:
        """The ledger may have changed: hand its decisions to the disk, and look whose wait is over.

        Args:
            wake: whether anything changed that anybody may wait for. A thousand replicas wait.

        Returns:
            What `durable` waits for.
        """
        decisions = self._ledger.take_decisions()
        if decisions:
            self._unwritten += decisions
            self._made += len(decisions)
            if self._writing is None:
                self._writing = asyncio.get_running_loop().create_task(self._write())
        self._log()
        if wake:
            self._waits.look_soon()
        return self._made

    async def durable(self, made: int) -> None:
        """Wait until so many decisions are on disk.

        Raises:
            FleetUnavailable: they could not be written.
        """
        while self._durable < made:
            self.enter()
            await self._written.wait()
        self.enter()

    @asynccontextmanager
    async def answer(self, *, records: bool = False, asks: bool = False) -> AsyncIterator[None]:
        """Around a call: its answer, or its error, waits for every decision made so far.

        Args:
            records: it asks for something new, which is refused while there is no space; see `check_space`.
            asks: it changes nothing.

        Raises:
            FleetUnavailable: they could not be written.
        """
        self.enter()
        try:
            if records:
                await self.check_space()
            yield
        finally:
            await self.durable(self.change(wake=not asks))

    async def result(self, call: PendingCall) -> Any:
        """Wait for a pending call; raises its error. The ledger's deadlines bound the wait."""
        self.change()
        await self.wait(lambda: call.done, None)
        if call.error is not None:
            raise type(call.error)(call.error.message, call.error.detail)
        return call.result

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Until it is true or the time is over; looked at after every change of the ledger."""
        await self._waits.wait(ready, timeout_s)
        self.enter()

    # -- the disk -----------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write what there is to write, and what comes meanwhile."""
        while self._unwritten and self._failure is None:
            decisions, self._unwritten = self._unwritten, []
            try:
                await self._on_disk(partial(self._journal.append, decisions))
            except Exception as error:  # whatever it was, the decisions are not on the disk
                self._fail(error)
            else:
                self._durable += len(decisions)
                self._written.set()
                self._written = asyncio.Event()
                self._log()
        self._writing = None

    def _log(self) -> None:
        if self._durable == self._made:  # a log does not say what may be lost
            self._log_lines.write(self._ledger.events_since(self._log_lines.last_id))

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = str(error)
        logger.error("decisions lost, and the controller answers no more: %s", error)
        # The next process may take over at once; not before a write that hangs has come back.
        asyncio.get_running_loop().run_in_executor(self._disk_thread, self._journal.close)
        self._written.set()
        self._waits.end_all()

    async def _on_disk(self, action: Callable[[], T]) -> T:
        """Run it in the thread that alone uses the journal.

        Raises:
            TimeoutError: the disk hangs.
            Exception: what the action raised.
        """
        done = asyncio.get_running_loop().run_in_executor(self._disk_thread, action)
        try:
            async with asyncio.timeout(DISK_S):  # not wait_for, which can swallow a cancellation
                return await asyncio.shield(done)
        except TimeoutError:
            raise TimeoutError(f"the disk has not answered for {DISK_S:g} s") from None

    async def _keep_disk(self) -> None:
        """The journal stays where a successor looks for it, and has space."""
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                await self._on_disk(self._journal.stay)
                await self._reserve()
            except Exception as error:  # it cannot be put back
                self._fail(error)

    async def _reserve(self) -> None:
        """Reserve space in the journal; say so when that begins or ceases to be possible."""
        if self._journal.has_space and self._disk_problem is None:
            return
        before, self._disk_problem = self._disk_problem, await self._on_disk(self._journal.reserve)
        if self._disk_problem is not None and before is None:
            logger.error("no space for decisions, publishers are refused: %s", self._disk_problem)
        elif self._disk_problem is None and before is not None:
            logger.warning("there is space for decisions again: publishers are admitted")

    # -- time ---------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                silent = self._ledger.tick(self.now())
                self.change()
                for replica_id in silent:
                    self._processes.end(replica_id)
                if self._durable == self._made:  # what it removes must not be what a successor knows
                    self._on_tick()
            except Exception:  # the ticker enforces every deadline: it must go on
                logger.exception("controller tick failed")

    async def _watch_forever(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                await self._check_silent()
            except Exception:  # whatever it was, silent replicas must be looked up
                logger.exception("looking silent replicas up failed")

    async def _check_silent(self) -> None:
        silent = self._ledger.silent_since(self.now() - self._silent_s())
        for replica_id, incarnation in await self._processes.gone(silent):
            self._ledger.lost(replica_id, incarnation, "its process is gone", self.now())
            self.change()

    def release(self) -> None:
        """Give the state directory to the next process, before anybody has called."""
        self._journal.close()
        self._disk_thread.shutdown(wait=False)

    async def aclose(self) -> None:
        """End what runs, and close the journal."""
        self._failure = "it is closed" if self._failure is None else self._failure
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._processes.close()
        try:
            await self._on_disk(self._journal.close)
        except TimeoutError as error:
            logger.error("the journal is not closed: %s", error)
        self._disk_thread.shutdown(wait=False)
