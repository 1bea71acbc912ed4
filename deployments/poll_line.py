"""What replicas and the controller say to each other over a replica's own connection.

A poll over Serve's handles costs the controller's process about a millisecond: two calls of an actor, each
with a change of threads. A thousand replicas poll some eight times a round. Over a connection of its own a
poll costs a tenth. Serve's handle says where the controller listens, and with which key.

    frame    length (4 bytes) ─ number of the poll (4 bytes) ─ pickled Report, Directive or Unanswered

The first bytes of a connection are the key. Nothing is unpickled before it has been checked. The controller's
end is `deployments.controller.poll_server`; the replica's is here:

    poll ──► not connected: Serve's handle says where the controller is ──► connect ──► report
             connected ──────────────────────────────────────────────────────────────► report

A connection that breaks, or on which no answer comes in time, is closed, and the next poll asks anew: the
controller may be another process on another host.
"""

import asyncio
import contextlib
import itertools
import pickle
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from deployments.errors import FleetUnavailable
from deployments.protocol.instructions import Directive
from deployments.protocol.reports import Report

KEY_BYTES = 32
MAX_FRAME_BYTES = 1 << 30  # a directive carries what a publisher sends, as a request's body does
CONNECT_TIMEOUT_S = 10.0
POLL_TIMEOUT_S = 20.0  # longer than the controller lets a poll wait
READ_BYTES = 1 << 18
_HEAD = struct.Struct("!II")


@dataclass(frozen=True, slots=True, kw_only=True)
class PollAddress:
    """Where the controller listens for polls."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """In the place of a directive."""

    reason: str


def frame(number: int, message: object) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body), number) + body


class Frames:
    """The messages in the bytes that come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, object]]:
        """The number and the message of each frame that is complete.

        Raises:
            ValueError: a frame is too long.
        """
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = pickle.loads(view[_HEAD.size : end])
            del self._bytes[:end]
            yield number, message


class Polls:
    """The polls of one replica.

    Args:
        address: asks the controller where it listens.
        timeout_s: of one poll, longer than the controller lets it wait.
    """

    def __init__(
        self, address: Callable[[], Awaitable[PollAddress]], *, timeout_s: float = POLL_TIMEOUT_S
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._line: _Line | None = None
        self._connecting = asyncio.Lock()

    async def poll(self, report: Report) -> Directive:
        """The controller's answer.

        Raises:
            FleetUnavailable: it gave none, or the connection broke.
            TimeoutError: none came in time.
            Exception: Serve's, of a controller that is away.
        """
        try:
            async with asyncio.timeout(self._timeout_s):  # not wait_for, which can swallow a cancellation
                return await (await self._connected()).ask(report)
        except TimeoutError:
            self.close()  # its host may be gone, which the connection does not say
            raise

    def close(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.close()

    async def _connected(self) -> "_Line":
        async with self._connecting:
            if self._line is None or self._line.closed:
                address = await self._address()
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(address.key)
                self._line = _Line(reader, writer)
            return self._line


class _Line:
    """One connection, and who waits for an answer on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Directive]] = {}
        self.closed = False
        self._reading = asyncio.create_task(self._read())

    async def ask(self, report: Report) -> Directive:
        """The answer to a report."""
        number = next(self._numbers)
        answer: asyncio.Future[Directive] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(frame(number, report))
            return await answer
        finally:
            del self._waiting[number]

    def close(self) -> None:
        self.closed = True
        self._reading.cancel()

    async def _read(self) -> None:
        frames = Frames()
        reason = "the controller closed the connection"
        try:
            while data := await self._reader.read(READ_BYTES):
                for number, message in frames.feed(data):
                    self._take(number, message)
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.closed = True
            with contextlib.suppress(Exception):  # it is broken already
                self._writer.transport.abort()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(FleetUnavailable(f"the controller cannot be reached: {reason}"))

    def _take(self, number: int, message: object) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return  # nobody waits for it any more
        if isinstance(message, Unanswered):
            waiting.set_exception(FleetUnavailable(message.reason))
        else:
            assert isinstance(message, Directive)
            waiting.set_result(message)
