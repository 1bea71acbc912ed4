"""One request and its answer over a connection to a replica's server, in HTTP/1.1.

    Connection ──bytes──► httptools' parser ──callbacks──► Answer ──piece()──► whoever waits

A router reads tens of thousands of pieces in a second, one event of one stream each. aiohttp's client took as
long for a piece as the system takes to read and to write it. This one does what the router needs of a client
and no more: no redirects, cookies, compression or encryption. The protocol is read by the parser of uvicorn.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, cast

import httptools

MAX_WAITING_BYTES = 1 << 18  # of an answer that nobody has taken yet; then the connection is not read
JOINED_BYTES = 1 << 16  # a body of fewer is sent in one piece with the head

Headers = list[tuple[bytes, bytes]]
Take = Callable[[bytes], Coroutine[Any, Any, None]]


class ExchangeLost(Exception):
    """The connection ended, or what came was not HTTP, before the answer was whole."""


class Answer:
    """The answer to one request, while it arrives; one coroutine reads it.

    Attributes:
        status: valid once it has begun, like the other two.
        headers: names in lower case, in the order in which they came.
        content_length: None: the length is not known before the end.
    """

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._take: Take | None = None
        self._taking: _Started | None = None
        self._waiting_bytes = 0
        self._begun = False
        self._failure: str | None = None
        self.is_complete = False
        self.keeps_connection = False
        self.heard_at = self._loop.time()  # when something came last
        self.status = 0
        self.headers: Headers = []
        self.content_length: int | None = None

    async def begin(self) -> None:
        """Wait for its head.

        Raises:
            ExchangeLost: it did not come.
        """
        while not self._begun:
            await self._news()

    async def piece(self) -> bytes:
        """What has come of the body since the last piece; empty at its end.

        Raises:
            ExchangeLost: the rest will not come. What had come was given before.
        """
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._news()
        return self._taken()

    async def pass_on(self, take: Take) -> None:
        """Pass the rest of the body on; returns at its end.

        It does what `while piece := await answer.piece(): await take(piece)` does. But as long as `take` has
        nothing to wait for it is called right where a piece arrives, and no task is woken for each.

        Args:
            take: gets a piece; its exceptions are raised here.

        Raises:
            ExchangeLost: the rest will not come.
        """
        while True:
            while self._pieces:
                await take(self._taken())
            if self.is_complete:
                return
            self._take = take
            try:
                await self._news()
            finally:
                self._take = None
            if self._taking is not None:
                taking, self._taking = self._taking, None
                await taking

    async def rest(self) -> bytes:
        """The body up to its end, of which no piece was taken yet.

        Raises:
            ExchangeLost: the rest will not come.
        """
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name, which is in lower case."""
        return next((value for each, value in self.headers if each == name), None)

    def close(self) -> None:
        """Give it up: whoever reads it is told that it was lost."""
        self._connection.abort()
        self.fail("it was given up")

    def feed(self, data: bytes) -> None:
        """What came over the connection."""
        if self._failure is not None:
            return
        self.heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._connection.abort()
            self.fail(str(cause or error))

    def fail(self, reason: str) -> None:
        """The connection is gone, or of no use any more."""
        if not self.is_complete and self._failure is None:
            self._failure = reason
            self._wake()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.keeps_connection = False
            raise ExchangeLost("a second answer came to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        length = self.header(b"content-length")
        self.content_length = 0 if self.status in (204, 304) else None if length is None else int(length)
        if self.content_length is None and self.header(b"transfer-encoding") is None:
            raise ExchangeLost("an answer whose end could not be told from a broken connection")
        self._begun = True
        self._wake()

    def on_body(self, piece: bytes) -> None:
        if self._take is not None:
            started = _Started(self._take(piece))
            if not started.is_done:
                self._take, self._taking = None, started
                self._wake()
            return
        self._pieces.append(piece)
        before, self._waiting_bytes = self._waiting_bytes, self._waiting_bytes + len(piece)
        if before <= MAX_WAITING_BYTES < self._waiting_bytes:
            self._connection.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status < 200:  # "continue" and the like come before the answer
            self.headers = []
            return
        self.keeps_connection = self._parser.should_keep_alive() and self._connection.has_sent_all()
        self.is_complete = True
        self._wake()

    def _taken(self) -> bytes:
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._connection.resume_reading()
        self._waiting_bytes = 0
        return piece

    async def _news(self) -> None:
        if self._failure is not None:
            raise ExchangeLost(self._failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Started:
    """A coroutine that runs at once up to its first wait, and goes on where this is awaited.

    It is what `asyncio.eager_task_factory` does, which Python has from 3.12 on, but makes a task of nothing.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._error: Exception | None = None
        self.is_done = False
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration:
            self.is_done = True
        except Exception as error:  # broad: it is raised to the one who awaits
            self._error = error

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is not None:
            raise self._error
        # A task takes the future that was yielded as if it had just been awaited.
        waits_for = self._waits_for
        try:
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # a cancellation, say
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
        except StopIteration:
            return


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._answer: Answer | None = None

    @property
    def is_open(self) -> bool:
        """Neither side has ended it."""
        return not self._transport.is_closing()

    def has_sent_all(self) -> bool:
        """Nothing of the request waits here: an answer can come before its question is whole."""
        return self._transport.get_write_buffer_size() == 0

    def ask(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """Send a request; its length is added to the headers.

        Args:
            target: path and query, encoded.

        Raises:
            ValueError: a line break in them would be another header, or another request; servers let none in.
        """
        lines = [f"{method} {target} HTTP/1.1", *[f"{name}: {value}" for name, value in headers]]
        if body or method != "GET":
            lines.append(f"content-length: {len(body)}")
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise ValueError("expected a request without line breaks in its target and headers")
        self._answer = answer = Answer(self)
        if len(body) < JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        return answer

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    def pause_reading(self) -> None:
        if self.is_open:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    # asyncio's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.abort()  # nothing was asked
        else:
            self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.fail(str(error) if error else "the connection was closed")
