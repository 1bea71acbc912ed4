"""Publishes a checkpoint directory, as one ordinary round: this process is its publisher.

    router    lease ─► headers ─► open ─► digests of part 1 ─► send ─► ... ─► close
    replica                                                    reads part 1 by itself, compares, stages

The digests are of the files as they are now. Those of a stored version must be the ones that its manifest
has: else a file that rotted would be committed as verified.

The router waits for the disk in a thread. While replicas read one part, it reads the next.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from deployments.calls.publish_session import PublishSession
from deployments.calls.rpc import CallHandle
from deployments.protocol.errors import (
    Conflict,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
    TransferAborted,
)
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.weights.store.checkpoint_files import PART_BYTES, Checkpoint, stated

DISK_S = 120.0  # for all headers, and for each part

T = TypeVar("T")


class DirectoryPublisher:
    """One directory at a time: the fleet has one lease.

    Args:
        roots: directories below which every published one is.
        disk_s: how long the disk may take for the headers, or for a part.
    """

    def __init__(
        self,
        controller: CallHandle,
        roots: Sequence[Path],
        *,
        part_bytes: int = PART_BYTES,
        disk_s: float = DISK_S,
    ) -> None:
        self._controller = controller
        self._roots = tuple(roots)
        self._part_bytes = part_bytes
        self._disk = DiskThread(disk_s)

    async def publish(self, path: str, label: str | None) -> RoundReport:
        """Make the weights in a directory the fleet's next version.

        Raises:
            InvalidRequest: it is outside the roots, is no whole checkpoint of this model, holds NaN, or is a
                stored version that is damaged.
            Conflict: another publisher holds the lease, or the weights sleep.
            RoundAborted: it changed while it was read, not every replica reads the same, or a disk hangs.
            TransferAborted: the controller or the lease was lost; publish again.
        """
        try:
            async with PublishSession(self._controller, f"directory {secrets.token_hex(4)}") as session:
                await session.acquire()
                opening = partial(Checkpoint.open, path, self._roots, self._part_bytes)
                checkpoint = await session.renewing(self._disk.run(opening, path))
                try:
                    return await self._round(session, checkpoint, label)
                finally:
                    checkpoint.close()
        except (StalePublisher, TransferAborted) as error:
            raise TransferAborted(
                f"{path} is not published: {error.message}; publish again", {"send_again": True}
            ) from error

    async def _round(self, session: PublishSession, checkpoint: Checkpoint, label: str | None) -> RoundReport:
        await session.open(RoundOptions(persist=True, file_bytes=checkpoint.size_bytes))
        try:
            await self._send(session, checkpoint)
            return await session.close(label)
        except (InvalidRequest, RoundAborted) as error:
            await session.abort(error.message)  # before the disk is asked, which may take long
            await self._raise_if_changed(checkpoint, error)
            raise

    async def _send(self, session: PublishSession, checkpoint: Checkpoint) -> None:
        sending: asyncio.Future[None] | None = None
        try:
            for part in checkpoint.parts:
                reading = self._disk.run(partial(stated, part, checkpoint.written), part.path)
                ready = await session.renewing(reading)
                if sending is not None:
                    await sending
                sending = asyncio.ensure_future(session.send(ready))
            if sending is not None:
                await sending
        finally:
            if sending is not None:
                sending.cancel()

    async def _raise_if_changed(self, checkpoint: Checkpoint, error: SlipstreamError) -> None:
        try:
            changed = await self._disk.run(checkpoint.changed, str(checkpoint.directory))
        except SlipstreamError:  # of a disk that does not answer: the first error says so
            return
        if changed is not None:
            raise RoundAborted(
                f"{changed}; publish it again once it is complete ({error.message})", error.detail
            ) from error


class DiskThread:
    """Runs what may wait for a disk in a thread that nothing waits for, not even the end of this process.

    Args:
        limit_s: for each run.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running = False

    async def run(self, work: Callable[[], T], what: str) -> T:
        """Its result.

        Raises:
            InvalidRequest: it raised ValueError or OSError.
            RoundAborted: the disk does not answer.
            Conflict: it has not answered an earlier call either.
        """
        if self._running:
            raise Conflict(f"{what}: a disk has not answered since an earlier call")
        self._running = True
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            self._running = False
            if done.done():
                return  # nobody waits any more
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast(T, result))

        def work_and_deliver() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # the caller's, whatever it is
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, result, error)

        threading.Thread(target=work_and_deliver, name="disk", daemon=True).start()
        try:
            async with asyncio.timeout(self._limit_s):
                return await done
        except TimeoutError:
            raise RoundAborted(f"{what}: the disk has not answered for {self._limit_s:g} s") from None
        except OSError as error:
            raise InvalidRequest(f"{what} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(str(error)) from error
