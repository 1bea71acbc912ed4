"""Publishes a checkpoint directory, as one ordinary round: this process is its publisher.

    router    lease ─► headers ─► open ─► digests of part 1 ─► send ─► ... ─► close
    replica                                                    reads part 1 by itself, compares, stages

The digests are of the files as they are now. Those of a stored version must be the ones that its manifest
has: else a file that rotted would be committed as verified.

The router waits for the disk in a thread. While replicas read one part, it reads the next. Whatever fails
before the close, the fleet keeps its version; `close` is asked again of a controller's successor.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from app.http.lease import CLEAN_UP_TIMEOUT_S, RENEW_S
from deployments.errors import (
    Conflict,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
    TransferAborted,
)
from deployments.logs import serve_logger
from deployments.lost_calls import answered, is_lost
from deployments.protocol.publishing import Lease, RoundOptions, RoundReport
from deployments.unary import UnaryHandle
from deployments.weights.store.checkpoint import PART_BYTES, Checkpoint, stated

DISK_S = 120.0  # for all headers, and for each part
CLOSE_S = 600.0  # the controller has deadlines of its own; this one ends a call to a hung controller

T = TypeVar("T")
logger = serve_logger()


class DirectoryPublisher:
    """One directory at a time: the fleet has one lease.

    Args:
        roots: directories below which every published one is.
        disk_s: how long the disk may take for the headers, or for a part.
        renew_s: how often the lease is renewed; well below its duration.
    """

    def __init__(
        self,
        controller: UnaryHandle,
        roots: Sequence[Path],
        *,
        part_bytes: int = PART_BYTES,
        disk_s: float = DISK_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._controller = controller
        self._roots = tuple(roots)
        self._part_bytes = part_bytes
        self._disk = DiskThread(disk_s)
        self._renew_s = renew_s

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
            async with self._lease() as token:
                opening = partial(Checkpoint.open, path, self._roots, self._part_bytes)
                checkpoint = await self._disk.run(opening, path)
                try:
                    return await self._round(token, checkpoint, label)
                finally:
                    checkpoint.close()
        except StalePublisher as error:  # a successor was there at the next call, and knows no lease
            raise TransferAborted(
                f"{path} is not published: its lease ended with its controller, or could not be renewed "
                f"({error.message}); publish again",
                {"send_again": True},
            ) from error
        except Exception as error:
            if not is_lost(error):
                raise
            raise TransferAborted(
                f"the controller was lost while {path} was published, and the round with it; publish again",
                {"send_again": True},
            ) from error

    async def _round(self, token: int, checkpoint: Checkpoint, label: str | None) -> RoundReport:
        options = RoundOptions(persist=True, file_bytes=checkpoint.size_bytes)
        round_id: int = await self._controller.open_round.remote(token, options)
        try:
            await self._send(token, round_id, checkpoint)
        except BaseException as error:  # whatever it was: nobody goes on with this round
            await self._abort(token, round_id, str(error) or type(error).__name__)
            if isinstance(error, InvalidRequest | RoundAborted):
                await self._raise_if_changed(checkpoint, error)
            raise
        try:
            report: RoundReport = await answered(
                lambda: self._controller.close_round.remote(token, round_id, label),
                f"the end of round {round_id}",
                wait_s=CLOSE_S,
            )
        except InvalidRequest as error:
            await self._raise_if_changed(checkpoint, error)
            raise
        return report

    async def _send(self, token: int, round_id: int, checkpoint: Checkpoint) -> None:
        sending: asyncio.Future[None] | None = None
        try:
            for part in checkpoint.parts:
                ready = await self._disk.run(partial(stated, part, checkpoint.written), part.path)
                if sending is not None:
                    await sending
                sending = asyncio.ensure_future(_sent(self._controller.send.remote(token, round_id, ready)))
            if sending is not None:
                await sending
        finally:
            if sending is not None and not sending.done():
                sending.cancel()  # the abort that follows ends the call itself

    async def _raise_if_changed(self, checkpoint: Checkpoint, error: SlipstreamError) -> None:
        try:
            changed = await self._disk.run(checkpoint.changed, str(checkpoint.directory))
        except SlipstreamError:  # of a disk that does not answer: the first error says so
            return
        if changed is not None:
            raise RoundAborted(
                f"{changed}; publish it again once it is complete ({error.message})", error.detail
            ) from error

    async def _abort(self, token: int, round_id: int, reason: str) -> None:
        aborting = self._controller.abort_round.remote(token, round_id, reason)
        await _undone(aborting, f"round {round_id} is not aborted, and ends with its lease")

    @contextlib.asynccontextmanager
    async def _lease(self) -> AsyncIterator[int]:
        """A lease of this publication's own; renewed, because reading takes longer."""
        lease: Lease = await self._controller.acquire.remote(f"directory {secrets.token_hex(4)}")
        renewing = asyncio.create_task(self._renew(lease.token))
        try:
            yield lease.token
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await _undone(
                self._controller.release.remote(lease.token), "the lease is not released and expires"
            )

    async def _renew(self, token: int) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            await self._controller.renew.remote(token)


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


async def _undone(call: Awaitable[object], otherwise: str) -> None:
    """Undo something. A call has an outcome already, which must not be hidden."""
    try:
        await asyncio.wait_for(_sent(call), CLEAN_UP_TIMEOUT_S)
    except Exception as error:
        if not (is_lost(error) or isinstance(error, SlipstreamError | TimeoutError)):
            raise
        logger.info("%s: %s", otherwise, error)


async def _sent(call: Awaitable[T]) -> T:
    """A response of Serve's as a coroutine."""
    return await call
