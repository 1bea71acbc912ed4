"""Drives the ledger: makes its decisions durable, enforces its deadlines, wakes its callers.

    call     changes the ledger ─► wakes waits that are over ─► answers once its decisions are durable
    report   is taken in ─► one look at the consequences of all reports of this moment
    disk     decisions to the journal, in a thread: one commit for all that arrived during the one before
    ticker   deadlines and leases
    watcher  whether the processes of silent members still exist

An answer waits until all decisions it may depend on are on disk; the event loop never does. On a full disk a
publisher's call is refused before it changes the ledger. On a failing or hanging disk every call and the
health check fail; the next process recovers what was written.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from deployments.controller.events import LogLines, count
from deployments.controller.journal import Journal
from deployments.controller.ray_cluster import IsAlive, Kill, ReplicaProcesses
from deployments.controller.store_keeper import StoreKeeper
from deployments.host.logs import serve_logger
from deployments.ledger.decisions import Decision
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol.errors import FleetUnavailable

DISK_S = 60.0  # per write; if the disk hangs, the next process may succeed
LOCK_WAIT_S = 10.0
LOOK_SHARE = 0.2  # fraction of the event loop's time
STALL_S = 2.0
WAKE_AT_ONCE = 32  # waits; the loop serves others in between

T = TypeVar("T")
logger = serve_logger()


def open_journal(state_dir: Path) -> Journal:
    """Wait for a predecessor to exit, and open its journal. Raises JournalError."""
    return Journal(state_dir, lock_wait_s=LOCK_WAIT_S)


class Waits:
    """Waits for the ledger. Each wakes only when its own condition holds.

    Waking a thousand coroutines per heartbeat of a thousand replicas would cost ten times as much.
    """

    def __init__(self) -> None:
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._ready: deque[asyncio.Future[None]] = deque()
        self._look_scheduled = self._release_scheduled = False

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        if ready():
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._conditions[woken] = ready
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            pass
        finally:
            self._conditions.pop(woken, None)

    def look_soon(self) -> None:
        """After the callbacks of this moment."""
        if self._conditions and not self._look_scheduled:
            self._look_scheduled = True
            asyncio.get_running_loop().call_soon(self._look)

    def end_all(self) -> None:
        self._ready.extend(self._conditions)
        self._conditions.clear()
        self._release()

    def _look(self) -> None:
        self._look_scheduled = False
        for woken, ready in list(self._conditions.items()):
            try:
                if not ready():
                    continue
            except Exception as error:  # raised in its own waiter
                if not woken.done():
                    woken.set_exception(error)
            self._ready.append(woken)
            del self._conditions[woken]
        if not self._release_scheduled:
            self._release()

    def _release(self) -> None:
        """Wake some now, the others after the event loop's next input."""
        for _ in range(min(WAKE_AT_ONCE, len(self._ready))):
            woken = self._ready.popleft()
            if not woken.done():
                woken.set_result(None)
        self._release_scheduled = bool(self._ready)
        if self._release_scheduled:
            asyncio.get_running_loop().call_soon(self._release)


class DurableLedger:
    """A ledger with a journal, a clock and waits. Arguments: `Controller`'s. Raises JournalError: the state
    directory cannot be used."""

    def __init__(
        self,
        ledger: Ledger,
        store: StoreKeeper,
        state_dir: Path,
        *,
        is_alive: IsAlive,
        kill: Kill,
        silent_s: float,
        tick_s: float,
        clock: Callable[[], float],
        open_journal: Callable[[Path], Journal],
    ) -> None:
        self._ledger = ledger
        self._processes = ReplicaProcesses(is_alive, kill)
        self._silent_s = silent_s
        self._tick_s = tick_s
        self._clock = clock
        self._store = store
        self._log_lines = LogLines()
        journal = open_journal(state_dir)
        self._last_now = clock()
        wall = time.time() - self._last_now
        self._ledger.recover(journal.recovered, self._last_now, uuid.uuid4().hex, wall)
        journal.append(self._ledger.take_decisions())
        journal.reserve()
        self._waits = Waits()
        self._journal = journal  # only the thread uses it from here on
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._no_space: str | None = None  # why a publisher's decisions cannot be written
        self._unwritten: list[Decision] = []
        self._made = self._on_disk = 0
        self._writing: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._failure: str | None = None
        self._running: list[asyncio.Task[None]] = []
        self.looks = 0  # looks at the consequences of reports so far
        self._look_scheduled = False
        self._look_at = 0.0  # event-loop time before which no look happens

    def enter(self) -> None:
        self._check()
        if not self._running:
            loop = asyncio.get_running_loop()
            self._running = [
                loop.create_task(self._every_tick(each))
                for each in (self._tick, self._watch, partial(self._reserve, look=True))
            ]

    def now(self) -> float:
        """Monotonic time; the first read after a stall extends every deadline by the length of the stall."""
        now = self._clock()
        stalled_s, self._last_now = now - self._last_now, now
        if stalled_s > STALL_S:
            if self._running:  # else no call has come since the start
                logger.warning("the controller was stalled for %.1f s: deadlines are extended", stalled_s)
            self._ledger.credit(stalled_s, now)
        return now

    def change(self, *, wake: bool = True) -> int:
        """Hand the ledger's decisions to the disk, and wake waits that are over. `wake`: something changed
        that others may wait for. Returns the argument for `durable`."""
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
        """Schedule one look at the consequences of all reports until then. Returns the value of `looks` after
        it.

        A look visits all members: one per report would make a thousand joins a million visits. So looks take
        at most `LOOK_SHARE` of the loop's time, while one is shorter than a tick.
        """
        if not self._look_scheduled:
            self._look_scheduled = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._look_at, loop.time()), self._look)
        return self.looks + 1

    async def durable(self, made: int) -> None:
        """Raises FleetUnavailable: the write failed."""
        while self._on_disk < made:
            self._check()
            await self._written.wait()
        self._check()

    @asynccontextmanager
    async def answer(self, *, records: bool = False, asks: bool = False) -> AsyncIterator[None]:
        """Results and errors wait for every decision so far.

        Args:
            records: refused while there is no space.
            asks: the call changes nothing.

        Raises:
            FleetUnavailable: decisions could not be written, or have no space.
        """
        self.enter()
        try:
            if records:
                await self._reserve()
                self._check()
            if records and self._no_space is not None:
                raise FleetUnavailable(
                    f"the controller cannot record updates: {self._no_space}. Serving continues. "
                    "Free space on the disk of 'state_dir', or mount it again",
                    {"disk": self._no_space},
                )
            yield
        finally:
            await self.durable(self.change(wake=not asks))

    async def result(self, call: PendingCall) -> Any:
        """Raises its error. The ledger's deadlines bound the wait."""
        self.change()
        await self.wait(lambda: call.done, None)
        if call.error is not None:
            raise type(call.error)(call.error.message, call.error.detail)
        return call.result

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Evaluated after every change of the ledger."""
        await self._waits.wait(ready, timeout_s)
        self.enter()

    def _look(self) -> None:
        self.looks, self._look_scheduled = self.looks + 1, False
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._ledger.advance(self.now())
        except Exception:  # the next tick looks again
            logger.exception("failed to process reports")
        self.change()
        ended = loop.time()
        # At most a tick, which looks anyway: this process may have stalled meanwhile.
        self._look_at = ended + min((ended - began) * (1 / LOOK_SHARE - 1), self._tick_s)

    def _log(self) -> None:
        if self._on_disk == self._made:  # the log must not state what may be lost
            events = self._ledger.events_since(self._log_lines.last_id)
            self._log_lines.write(events)
            count(events, self._ledger.state.history)

    def _check(self) -> None:
        if self._failure is not None:
            message = f"the controller cannot write its decisions and is being replaced: {self._failure}"
            raise FleetUnavailable(message, {"restarting": True})

    async def _write(self) -> None:
        while self._unwritten and self._failure is None:
            decisions, self._unwritten = self._unwritten, []
            try:
                await self._in_thread(partial(self._journal.append, decisions))
            except Exception as error:  # after any error the decisions are not on disk
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
        logger.error("failed to persist decisions; controller is shutting down: %s", error)
        # The next process may take over at once, or after a hanging write returns.
        asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._written.set()
        self._waits.end_all()

    async def _reserve(self, *, look: bool = False) -> None:
        known = self._journal.has_space and self._no_space is None and not look
        if self._failure is not None or known:
            return
        before = self._no_space
        try:
            self._no_space = await self._in_thread(self._journal.reserve)
        except Exception as error:  # the disk is gone
            self._fail(error)
        if self._no_space is not None and before is None:
            logger.error("no space for decisions, publishers are refused: %s", self._no_space)
        elif self._no_space is None and before is not None:
            logger.warning("space for decisions is available again: publishers are admitted")

    async def _in_thread(self, action: Callable[[], T]) -> T:
        """Raises the action's error, or TimeoutError if the disk hangs."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, action)
        try:
            async with asyncio.timeout(DISK_S):  # wait_for can swallow a cancellation
                return await asyncio.shield(done)
        except TimeoutError:
            raise TimeoutError(f"the disk has not answered for {DISK_S:g} s") from None

    async def _every_tick(self, work: Callable[[], Awaitable[None]]) -> None:
        while self._failure is None:
            await asyncio.sleep(self._tick_s)
            try:
                await work()
            except Exception:  # it enforces deadlines and must continue
                logger.exception("the controller failed in what it does every %g s", self._tick_s)

    async def _tick(self) -> None:
        silent = self._ledger.tick(self.now())
        self.change()
        for replica_id in silent:
            self._processes.kill(replica_id)
        if self._on_disk == self._made:  # a successor may still need what an unwritten decision frees
            self._store.remove_old()

    async def _watch(self) -> None:
        silent = self._ledger.silent_since(self.now() - self._silent_s)
        if gone := await self._processes.gone(silent):
            self._ledger.lost(gone, "its process is gone", self.now())
            self.change()

    def release(self) -> None:
        self._close()
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        """A successor may begin now."""
        self._journal.close()
        self._store.release()

    async def aclose(self) -> None:
        self._failure = self._failure or "it is closed"
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._processes.close()
        try:
            await self._in_thread(self._close)
        except TimeoutError as error:
            logger.error("the journal is not closed: %s", error)
        self._thread.shutdown(wait=False)
