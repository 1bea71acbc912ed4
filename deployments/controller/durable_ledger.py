"""The ledger in time: its decisions made durable, its deadlines checked, its pending calls awaited.

    call     changes the ledger ─► wakes those whose wait is over ─► answers once its decisions are durable
    report   taken in ─► one look at what follows from all reports of this moment
    disk     decisions to the journal, in a thread: one commit for all that came during the one before
    ticker   deadlines and leases
    watcher  whether the processes of silent members still exist; ends those that stand still

What is answered waits for every decision that the answer may depend on, so nobody can learn of a decision
that is not on disk. The event loop does not wait for the disk: replicas are heard while it is slow. While it
is full, a publisher's call is refused before it changes the ledger. If it fails or hangs, nothing is answered
any more and the health check fails: the next process recovers from what is written.

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

from deployments.controller.journal import Journal
from deployments.controller.liveness import End, IsAlive, Processes
from deployments.controller.log_lines import LogLines
from deployments.controller.waits import Waits
from deployments.host.logs import serve_logger
from deployments.ledger.decisions import Decision
from deployments.ledger.ledger import Ledger
from deployments.ledger.members import PendingCall
from deployments.protocol.errors import FleetUnavailable

DISK_S = 60.0  # for one write; after that the disk hangs, and the next process may have more luck
LOCK_WAIT_S = 10.0  # for a predecessor to end
LOOK_SHARE = 0.2  # of the event loop's time, for looks at what follows from reports
STALL_S = 2.0  # the ticker runs several times as often

T = TypeVar("T")
logger = serve_logger()


def open_journal(state_dir: Path) -> Journal:
    """Wait for a predecessor to end, and open its journal. Raises JournalError."""
    return Journal(state_dir, lock_wait_s=LOCK_WAIT_S)


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
        silent_s: float,
        tick_s: float,
        clock: Callable[[], float],
        open_journal: Callable[[Path], Journal],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._ledger = ledger
        self._processes = Processes(is_alive, end)
        self._silent_s = silent_s
        self._tick_s = tick_s
        self._clock = clock
        self._on_tick = on_tick
        self._log_lines = LogLines()
        journal = open_journal(state_dir)
        self._last_now = clock()
        self._ledger.recover(journal.recovered, self._last_now, uuid.uuid4().hex)
        journal.append(self._ledger.take_decisions())
        journal.reserve()
        self._waits = Waits()
        self._journal = journal  # used by the thread alone from now on
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._no_space: str | None = None  # for a publisher's decisions, and why
        self._unwritten: list[Decision] = []
        self._made = self._on_disk = 0  # decisions of this process
        self._writing: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._failure: str | None = None  # why nothing is written any more
        self._running: list[asyncio.Task[None]] = []
        self._looks, self._looks_soon = 0, False
        self._look_at = 0.0  # not before that time of the event loop

    @property
    def looks(self) -> int:
        """How often it was looked at what follows from reports; see `look_soon`."""
        return self._looks

    def enter(self) -> None:
        """The beginning of every call.

        Raises:
            FleetUnavailable: decisions could not be written.
        """
        self._check()
        if not self._running:
            loop = asyncio.get_running_loop()
            self._running = [
                loop.create_task(each)
                for each in (self._tick_forever(), self._watch_forever(), self._keep_journal())
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
        await self._reserve()
        self._check()
        if self._no_space is not None:
            raise FleetUnavailable(
                f"the controller cannot record updates: {self._no_space}; the fleet serves on. "
                "Free space on the disk of 'state_dir'",
                {"disk": self._no_space},
            )

    def change(self, *, wake: bool = True) -> int:
        """The ledger may have changed: hand its decisions to the disk, and look whose wait is over.

        Args:
            wake: whether anything changed that anybody may wait for. A thousand replicas wait.

        Returns:
            What `durable` waits for.
        """
        decisions = self._ledger.take_decisions()
        self._unwritten += decisions
        self._made += len(decisions)
        if decisions and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        self._log()
        if wake:
            self._waits.look_soon()
        return self._made

    def look_soon(self) -> int:
        """Something may follow from a report: look once, for all reports that are taken in meanwhile.

        A look is at all members: one for each of a thousand that join would be a million. So looks take at
        most `LOOK_SHARE` of this loop's time, as long as one is shorter than a tick.

        Returns:
            What `looks` will be then.
        """
        if not self._looks_soon:
            self._looks_soon = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._look_at, loop.time()), self._look)
        return self._looks + 1

    async def durable(self, made: int) -> None:
        """Wait until so many decisions are on disk.

        Raises:
            FleetUnavailable: they could not be written.
        """
        while self._on_disk < made:
            self._check()
            await self._written.wait()
        self._check()

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

    def _look(self) -> None:
        self._looks, self._looks_soon = self._looks + 1, False
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._ledger.advance(self.now())
        except Exception:  # the next tick looks again
            logger.exception("looking at what follows from reports failed")
        self.change()
        ended = loop.time()
        # At most a tick, which looks anyway: this process may have stood still in the middle.
        self._look_at = ended + min((ended - began) * (1 / LOOK_SHARE - 1), self._tick_s)

    def _log(self) -> None:
        if self._on_disk == self._made:  # a log does not say what may be lost
            self._log_lines.write(self._ledger.events_since(self._log_lines.last_id))

    # -- the disk -----------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises FleetUnavailable if decisions could not be written."""
        if self._failure is not None:
            message = f"the controller cannot write its decisions and is being replaced: {self._failure}"
            raise FleetUnavailable(message, {"restarting": True})

    async def _write(self) -> None:
        """Write what there is to write, and what comes meanwhile."""
        while self._unwritten and self._failure is None:
            decisions, self._unwritten = self._unwritten, []
            try:
                await self._in_thread(partial(self._journal.append, decisions))
            except Exception as error:  # whatever it was, the decisions are not on the disk
                self._fail(error)
            else:
                self._on_disk += len(decisions)
                self._written.set()
                self._written = asyncio.Event()
                self._log()
        self._writing = None

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = str(error)
        logger.error("decisions lost, and the controller answers no more: %s", error)
        # The next process may take over at once; not before a write that hangs has come back.
        asyncio.get_running_loop().run_in_executor(self._thread, self._journal.close)
        self._written.set()
        self._waits.end_all()

    async def _keep_journal(self) -> None:
        """It stays where a successor looks for it, and has space."""
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                await self._in_thread(self._journal.stay)
            except Exception as error:  # it cannot be put back
                self._fail(error)
            await self._reserve()

    async def _reserve(self) -> None:
        """Have space in the journal; say so when that begins or ceases to be possible."""
        if self._failure is not None or (self._journal.has_space and self._no_space is None):
            return
        before = self._no_space
        try:
            self._no_space = await self._in_thread(self._journal.reserve)
        except Exception as error:  # the disk is gone
            self._fail(error)
        if self._no_space is not None and before is None:
            logger.error("no space for decisions, publishers are refused: %s", self._no_space)
        elif self._no_space is None and before is not None:
            logger.warning("there is space for decisions again: publishers are admitted")

    async def _in_thread(self, action: Callable[[], T]) -> T:
        """Run it in the thread that alone uses the journal.

        Raises:
            TimeoutError: the disk hangs.
            Exception: what the action raised.
        """
        done = asyncio.get_running_loop().run_in_executor(self._thread, action)
        try:
            async with asyncio.timeout(DISK_S):  # not wait_for, which can swallow a cancellation
                return await asyncio.shield(done)
        except TimeoutError:
            raise TimeoutError(f"the disk has not answered for {DISK_S:g} s") from None

    # -- time ---------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                silent = self._ledger.tick(self.now())
                self.change()
                for replica_id in silent:
                    self._processes.end(replica_id)
                if self._on_disk == self._made:  # what it removes must not be what a successor knows
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
        silent = self._ledger.silent_since(self.now() - self._silent_s)
        if gone := await self._processes.gone(silent):
            self._ledger.lost(gone, "its process is gone", self.now())
            self.change()

    def release(self) -> None:
        """Give the state directory to the next process, before anybody has called."""
        self._journal.close()
        self._thread.shutdown(wait=False)

    async def aclose(self) -> None:
        """End what runs, and close the journal."""
        self._failure = self._failure or "it is closed"
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._processes.close()
        try:
            await self._in_thread(self._journal.close)
        except TimeoutError as error:
            logger.error("the journal is not closed: %s", error)
        self._thread.shutdown(wait=False)
