"""Run one HTTP request through an ASGI application in this process, answer by answer.

The router and the replica are separate processes: a request crosses as an `HttpRequest`, the
answer as one `HttpAnswer` followed by pieces of the body. An answer that is not a stream
crosses in one message.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    status: int
    headers: Headers
    body: bytes  # all of it, or the first piece of a stream
    streaming: bool


class AsgiCall:
    """One request in an application. Iterate `pieces()` after `start()`; `close()` ends the request."""

    def __init__(self, app: App, request: HttpRequest) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._request = request
        self._body_taken = False
        self._closed = asyncio.Event()
        self._task = asyncio.create_task(self._run(app))

    async def start(self) -> HttpAnswer:
        """Wait for the status and, unless it is an event stream, for the whole body.

        Raises:
            Exception: whatever the application raised before it answered.
        """
        begin = await self._next()
        headers = list(begin["headers"])
        streaming = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        body = b""
        if not streaming:
            body = b"".join([piece async for piece in self.pieces()])
        return HttpAnswer(status=begin["status"], headers=headers, body=body, streaming=streaming)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; whatever has piled up since the last piece is one piece."""
        more = True
        while more:
            message = await self._next()
            pieces, more = [message.get("body", b"")], message.get("more_body", False)
            while more and not self._messages.empty():
                message = await self._next()
                pieces.append(message.get("body", b""))
                more = message.get("more_body", False)
            yield b"".join(pieces)

    async def close(self) -> None:
        """End the request: to the application it is a client that went away."""
        self._closed.set()
        if not self._task.done():
            self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # what it raised was told by start() or pieces()
            await self._task

    async def _next(self) -> Message:
        message = await self._messages.get()
        if message is None:
            await self._task  # raises what the application raised
            raise RuntimeError("the application ended without finishing its answer")
        return message

    async def _run(self, app: App) -> None:
        try:
            await app(self._scope(), self._receive, self._messages.put)
        finally:
            await self._messages.put(None)

    async def _receive(self) -> Message:
        if not self._body_taken:
            self._body_taken = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    def _scope(self) -> Message:
        request = self._request
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": request.query,
            "headers": list(request.headers),
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
