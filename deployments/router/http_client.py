"""The router's HTTP/1.1 client for replicas.

    ReplicaConnection ──bytes──► httptools' parser ──callbacks──► ReplicaResponse ──piece()──► reader

A router reads tens of thousands of pieces per second, each a stream's event. An event costs 13 to 14 µs of
CPU, with aiohttp 25 to 31; waking a task per piece costs 1.2 to 1.6 times as much (`benchmarks.streams`,
2026-11-28). No redirects, cookies, compression or encryption.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httptools

MAX_UNREAD_BYTES = 1 << 18  # above it the connection is not read
JOINED_BYTES = 1 << 16  # smaller bodies are sent in one write with the head
CONNECT_TIMEOUT_S = 10.0
IDLE_S = 15.0  # idle timeout; a replica's is longer
# Detect a dead host; a dead process closes its connections.
SOCKET_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}

Headers = list[tuple[bytes, bytes]]
Take = Callable[[bytes], Coroutine[Any, Any, None]]


class NotConnected(Exception):
    """No connection; nothing was sent."""


class ResponseLost(Exception):
    """The response ended early or was not HTTP."""


class ReplicaResponse:
    """A response while it arrives. One coroutine reads it.

    Attributes:
        status, headers, content_length: valid after `begin`; names are lower case; the length may be None.
        heard_at: loop time of the last bytes.
    """

    def __init__(self, connection: "ReplicaConnection") -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._take: Take | None = None
        self._taking: _EagerCoroutine | None = None
        self._unread_bytes = 0
        self._begun = False
        self._failure: str | None = None
        self.is_complete = False
        self.keeps_connection = False
        self.heard_at = self._loop.time()
        self.status = 0
        self.headers: Headers = []
        self.content_length: int | None = None

    @property
    def has_unread(self) -> bool:
        return bool(self._pieces)

    async def begin(self) -> None:
        while not self._begun:
            await self._wait()

    async def piece(self) -> bytes:
        """Empty at the body's end. Raises ResponseLost."""
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        return b"".join(self._pop())

    async def pass_on(self, take: Take, *, joined: bool = True) -> None:
        """Call `take` with each remaining piece, of one chunk or, if `joined`, of several. Until it blocks,
        it runs inside the parser's callback, without waking a task. Raises ResponseLost."""
        while True:
            while self._pieces:
                pieces = self._pop()
                for piece in [b"".join(pieces)] if joined else pieces:
                    await take(piece)
            if self.is_complete:
                return
            self._take = take
            try:
                await self._wait()
            finally:
                self._take = None
            if self._taking is not None:
                taking, self._taking = self._taking, None
                await taking

    async def rest(self) -> bytes:
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    def header(self, name: bytes) -> bytes | None:
        return next((value for each, value in self.headers if each == name), None)

    def give_up(self, reason: str) -> None:
        self._connection.abort()
        self.fail(reason)

    def feed(self, data: bytes) -> None:
        if self._failure is not None:
            return
        self.heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self.give_up(str(cause or error))

    def fail(self, reason: str) -> None:
        if not self.is_complete and self._failure is None:
            self._failure = reason
            self._wake()

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.keeps_connection = False
            raise ResponseLost("a second response came to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        length = self.header(b"content-length")
        self.content_length = 0 if self.status in (204, 304) else None if length is None else int(length)
        if self.content_length is None and self.header(b"transfer-encoding") is None:
            raise ResponseLost("the end of this response could not be told from a broken connection")
        self._begun = True
        self._wake()

    def on_body(self, piece: bytes) -> None:
        if self._take is not None:
            started = _EagerCoroutine(self._take(piece))
            if not started.is_done:
                self._take, self._taking = None, started
                self._wake()
            return
        self._pieces.append(piece)
        before, self._unread_bytes = self._unread_bytes, self._unread_bytes + len(piece)
        if before <= MAX_UNREAD_BYTES < self._unread_bytes:
            self._connection.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200:
            self.headers = []
            return
        self.keeps_connection = self._parser.should_keep_alive() and self._connection.has_sent_all()
        self.is_complete = True
        self._wake()

    def _pop(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._connection.resume_reading()
        self._unread_bytes = 0
        return pieces

    async def _wait(self) -> None:
        if self._failure is not None:
            raise ResponseLost(self._failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _EagerCoroutine:
    """Runs a coroutine until it first blocks; awaiting this object continues it. Like
    `asyncio.eager_task_factory` (Python 3.12), without a task."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._error: Exception | None = None
        self.is_done = False
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration:
            self.is_done = True
        except Exception as error:  # broad: re-raised in `__await__`
            self._error = error

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is not None:
            raise self._error
        # A task accepts the yielded future as if just awaited.
        waits_for = self._waits_for
        try:
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # a cancellation, for example
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
        except StopIteration:
            return


class ReplicaConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._response: ReplicaResponse | None = None

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def has_sent_all(self) -> bool:
        """A response that completes before its request makes the connection unusable."""
        return self._transport.get_write_buffer_size() == 0

    def send(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> ReplicaResponse:
        """Raises ValueError for a line break in target or headers: it would inject a header or request."""
        lines = [f"{method} {target} HTTP/1.1", *[f"{name}: {value}" for name, value in headers]]
        if body or method != "GET":
            lines.append(f"content-length: {len(body)}")
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise ValueError("expected a request without line breaks in its target and headers")
        self._response = response = ReplicaResponse(self)
        if len(body) < JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        return response

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort()  # bytes without a request
        else:
            self._response.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._response is not None:
            self._response.fail(str(error) if error else "the connection was closed")


class ConnectionPool:
    """Without a limit."""

    def __init__(self) -> None:
        self._idle: dict[str, dict[ReplicaConnection, asyncio.TimerHandle]] = {}
        self._closed = False

    @asynccontextmanager
    async def request(
        self, address: str, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncIterator[ReplicaResponse]:
        """Leaving before the response is complete aborts the request. Raises NotConnected."""
        connection, is_kept = self._pop_idle(address) or await _connect(address), False
        try:
            response = connection.send(method, target, [("host", address), *headers], body)
            yield response
            # Unread pieces may have paused the connection.
            is_kept = response.is_complete and response.keeps_connection and not response.has_unread
        finally:
            if is_kept and not self._closed:
                timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, address, connection)
                self._idle.setdefault(address, {})[connection] = timer
            else:
                connection.abort()

    def close(self) -> None:
        self._closed = True
        for idle in self._idle.values():
            for connection, timer in idle.items():
                timer.cancel()
                connection.abort()
        self._idle.clear()

    def _pop_idle(self, address: str) -> ReplicaConnection | None:
        """Most recently used first, so that the others expire."""
        idle = self._idle.get(address)
        while idle:
            connection, timer = idle.popitem()
            timer.cancel()
            if connection.is_open:
                return connection
        self._idle.pop(address, None)
        return None

    def _expire(self, address: str, connection: ReplicaConnection) -> None:
        connection.abort()
        idle = self._idle[address]
        del idle[connection]
        if not idle:
            del self._idle[address]


async def _connect(address: str) -> ReplicaConnection:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, connection = await asyncio.get_running_loop().create_connection(
                ReplicaConnection, host.strip("[]"), int(port)
            )
    except (OSError, TimeoutError) as error:
        raise NotConnected(f"{type(error).__name__}: {error}") from error
    connected: socket.socket = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in SOCKET_OPTIONS.items():
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
