"""Publishes a checkpoint directory as an ordinary round.

    router    lease ─► headers ─► open ─► digests of part 1 ─► send ─► ... ─► close
    replica                                                    reads part 1 from disk, compares, stages

The router digests the next part while replicas read the current one. A stored version must match its
manifest's digests; file digests alone would accept bit rot. A URL is first downloaded into the store, without
a lease.
"""

import asyncio
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from deployments.calls.publish_session import PublishSession
from deployments.calls.rpc import CallHandle
from deployments.host.durable_files import locked
from deployments.protocol import errors
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.weights.store.checkpoint_files import PART_BYTES, Checkpoint, stated
from deployments.weights.store.uploads import allowed, download
from deployments.weights.store.versions import Store

DISK_S = 120.0
DOWNLOAD_S = 1800.0
INCOMING = "incoming"
LOCK = ".lock"  # held while a directory is downloaded and published

T = TypeVar("T")


class DirectoryPublisher:
    """Publishes one directory at a time.

    Args:
        roots: directories below which it may be; the first one is the fleet's store.
        urls: below which it may be elsewhere.
        disk_s: deadline for all headers, and for each part.
    """

    def __init__(
        self,
        controller: CallHandle,
        roots: Sequence[Path],
        urls: Sequence[str] = (),
        *,
        part_bytes: int = PART_BYTES,
        disk_s: float = DISK_S,
    ) -> None:
        self._controller = controller
        self._roots = tuple(roots)
        self._urls = tuple(urls)
        self._part_bytes = part_bytes
        self._disk = DiskThread(disk_s)
        self._network = DiskThread(DOWNLOAD_S, "the network")

    async def publish(self, path: str, label: str | None) -> RoundReport:
        """Publish the weights in a directory, or at a URL, as the next version.

        Raises:
            InvalidRequest: the directory is outside the roots, incomplete, damaged, or of another model.
            Conflict: another publisher holds the lease, or the weights are offloaded.
            RoundAborted: files changed meanwhile, replicas read different bytes, or a disk hangs.
            TransferAborted: controller or lease was lost; try again.
        """
        if "://" not in path:
            return await self._publish(path, label)
        async with self._downloaded(path) as directory:
            return await self._publish(str(directory), label)

    @asynccontextmanager
    async def _downloaded(self, url: str) -> AsyncIterator[Path]:
        incoming = partial(Incoming, url, self._urls, self._roots[0])
        found = await self._network.run(incoming, url)
        try:
            yield found.directory
        finally:
            await asyncio.shield(asyncio.to_thread(found.remove))

    async def _publish(self, path: str, label: str | None) -> RoundReport:
        try:
            async with PublishSession(self._controller, f"directory {secrets.token_hex(4)}") as session:
                await session.acquire()
                opening = partial(Checkpoint.open, path, self._roots, self._part_bytes)
                checkpoint = await session.renewing(self._disk.run(opening, path))
                try:
                    return await self._round(session, checkpoint, label)
                finally:
                    checkpoint.close()
        except (errors.StalePublisher, errors.TransferAborted) as error:
            raise errors.TransferAborted(
                f"{path} is not published: {error.message}; try again", {"send_again": True}
            ) from error

    async def _round(self, session: PublishSession, checkpoint: Checkpoint, label: str | None) -> RoundReport:
        await session.open(RoundOptions(persist=True, file_bytes=checkpoint.size_bytes))
        try:
            await self._send(session, checkpoint)
            changed = await session.renewing(self._disk.run(checkpoint.changed, str(checkpoint.directory)))
            if changed is None:  # else a mix of two checkpoints could pass
                return await session.close(label)
        except (errors.InvalidRequest, errors.RoundAborted) as error:
            await session.abort(error.message)  # first: the disk may be slow
            await self._raise_if_changed(checkpoint, error)
            raise
        reason = f"{changed}; publish it again once it is complete"
        await session.abort(reason)
        raise errors.RoundAborted(reason)

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

    async def _raise_if_changed(self, checkpoint: Checkpoint, error: errors.SlipstreamError) -> None:
        try:
            changed = await self._disk.run(checkpoint.changed, str(checkpoint.directory))
        except errors.SlipstreamError:
            return
        if changed is not None:
            raise errors.RoundAborted(
                f"{changed}; publish it again once it is complete ({error.message})", error.detail
            ) from error


class Incoming:
    """A URL's checkpoint in a directory of the store, until `remove`. Blocks during the download. Raises
    ValueError or OSError."""

    def __init__(self, url: str, urls: Sequence[str], store: Path) -> None:
        source = allowed(url, urls)
        parent = store / INCOMING
        parent.mkdir(exist_ok=True)
        remove_left(parent)
        self.directory = parent / secrets.token_hex(8)
        self.directory.mkdir()
        lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Also for a download that ends after its caller gave up.
        self.remove = weakref.finalize(self, _remove, self.directory, lock)
        try:
            locked(lock)
            download(source, self.directory, Store(store))
        except BaseException:  # removes an incomplete directory and its lock
            self.remove()
            raise


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def remove_left(parent: Path) -> None:
    """Left by killed routers."""
    for lock in parent.glob(f"*/{LOCK}"):
        with suppress(OSError):  # of another user, or gone: it stays for now
            descriptor = os.open(lock, os.O_RDWR)
            try:
                if locked(descriptor):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


class DiskThread:
    """Reads in a daemon thread: a hung disk delays neither callers nor process exit. `source`: named in
    errors."""

    def __init__(self, limit_s: float, source: str = "the disk") -> None:
        self._limit_s = limit_s
        self._source = source
        self._running = False

    async def run(self, work: Callable[[], T], what: str) -> T:
        """Raises InvalidRequest (`work` raised ValueError or OSError), RoundAborted (the deadline passed) or
        Conflict (an earlier call still hangs)."""
        if self._running:
            raise errors.Conflict(f"{what}: {self._source} has not answered since an earlier call")
        self._running = True
        result: Future[T] = Future()

        def read() -> None:
            result.set_running_or_notify_cancel()  # a caller that leaves can no longer cancel it
            try:
                value = work()
            except BaseException as error:
                self._running = False
                result.set_exception(error)
            else:
                self._running = False
                result.set_result(value)

        threading.Thread(target=read, name="disk", daemon=True).start()
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(result)
        except TimeoutError:
            raise errors.RoundAborted(
                f"{what}: {self._source} has not answered for {self._limit_s:g} s"
            ) from None
        except OSError as error:
            raise errors.InvalidRequest(f"{what} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise errors.InvalidRequest(str(error)) from error
