"""Decisions on their way to the journal, in a thread: one write and one sync for all that came meanwhile.

The event loop never waits for the disk: replicas are heard while it is slow. While the disk is full, a
publisher's call is refused before it changes the ledger, and serving goes on with the space that the journal
has reserved. If the disk fails or hangs, or that space is used up, nothing is answered any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from deployments.controller.journal import Journal
from deployments.errors import FleetUnavailable
from deployments.ledger.decisions import Decision
from deployments.logs import serve_logger

DISK_S = 60.0  # one write; after that the disk hangs, and the next process may have more luck

T = TypeVar("T")
logger = serve_logger()


class JournalWriter:
    """Writes decisions in order.

    Args:
        journal: used by this object's thread alone from now on.
        on_written: called after each write.
        on_failure: called once, when nothing can be written any more.
    """

    def __init__(
        self, journal: Journal, *, on_written: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        self._journal = journal
        self._on_written, self._on_failure = on_written, on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._no_space: str | None = None  # for a publisher's decisions, and why
        self._unwritten: list[Decision] = []
        self._made = self._durable = 0  # decisions of this process; those on disk
        self._writing: asyncio.Task[None] | None = None
        self._written = asyncio.Event()
        self._failure: str | None = None

    @property
    def made(self) -> int:
        """How many decisions were made: what `durable` waits for."""
        return self._made

    @property
    def all_written(self) -> bool:
        return self._durable == self._made

    @property
    def failed(self) -> bool:
        """Whether nothing is written any more."""
        return self._failure is not None

    def check(self) -> None:
        """Raises FleetUnavailable if decisions could not be written."""
        if self._failure is not None:
            message = f"the controller cannot write its decisions and is being replaced: {self._failure}"
            raise FleetUnavailable(message, {"restarting": True})

    def write(self, decisions: Sequence[Decision]) -> None:
        """Begin to write them; `durable` waits for the end."""
        if not decisions:
            return
        self._unwritten += decisions
        self._made += len(decisions)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def durable(self, made: int) -> None:
        """Wait until so many decisions are on disk.

        Raises:
            FleetUnavailable: they could not be written.
        """
        while self._durable < made:
            self.check()
            await self._written.wait()
        self.check()

    async def check_space(self) -> None:
        """Raises FleetUnavailable if the disk has no space for what may follow from a publisher's call."""
        if self._no_space is not None or not self._journal.has_space:
            await self._reserve()
        if self._no_space is not None:
            raise FleetUnavailable(
                f"the controller cannot record updates: {self._no_space}; the fleet serves on. "
                "Free space on the disk of 'state_dir'",
                {"disk": self._no_space},
            )

    async def keep(self, every_s: float) -> None:
        """The journal stays where a successor looks for it, and has space."""
        while self._failure is None:
            await asyncio.sleep(every_s)
            try:
                await self._on_disk(self._journal.stay)
                await self._reserve()
            except Exception as error:  # it cannot be put back
                self._fail(error)

    def release(self) -> None:
        """Give the state directory to the next process, before anything was written."""
        self._journal.close()
        self._thread.shutdown(wait=False)

    def end(self) -> None:
        """Write nothing any more."""
        self._failure = "it is closed" if self._failure is None else self._failure

    async def aclose(self) -> None:
        """Close the journal."""
        self.end()
        try:
            await self._on_disk(self._journal.close)
        except TimeoutError as error:
            logger.error("the journal is not closed: %s", error)
        self._thread.shutdown(wait=False)

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
                self._on_written()
        self._writing = None

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = str(error)
        logger.error("decisions lost, and the controller answers no more: %s", error)
        # The next process may take over at once; not before a write that hangs has come back.
        asyncio.get_running_loop().run_in_executor(self._thread, self._journal.close)
        self._written.set()
        self._on_failure()

    async def _reserve(self) -> None:
        """Reserve space in the journal; say so when that begins or ceases to be possible."""
        if self._journal.has_space and self._no_space is None:
            return
        before, self._no_space = self._no_space, await self._on_disk(self._journal.reserve)
        if self._no_space is not None and before is None:
            logger.error("no space for decisions, publishers are refused: %s", self._no_space)
        elif self._no_space is None and before is not None:
            logger.warning("there is space for decisions again: publishers are admitted")

    async def _on_disk(self, action: Callable[[], T]) -> T:
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
