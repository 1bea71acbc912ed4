"""A server that says what a test tells it to, and a router's connections to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from deployments.router.connections import Connections

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT_S = 10.0

Writes = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[Any, Any, None]], None]


class Server:
    """Answers each request by `writes`; a connection stays open until the client or `writes` closes it."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self.accepted = self.ended = 0
        self.requests: list[tuple[bytes, bytes]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                self.requests.append((head, await reader.readexactly(int(length or b"0"))))
                await self._writes(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            writer.close()

    async def until_ended(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.ended < count:
                await asyncio.sleep(0.01)


def says(*pieces: bytes, closes: bool = False) -> Writes:
    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001 if len(pieces) > 1 else 0)
        if closes:
            writer.close()

    return write


@asynccontextmanager
async def serving(writes: Writes, host: str = "127.0.0.1") -> AsyncIterator[tuple[Server, str, Connections]]:
    server, kept = Server(writes), Connections()
    async with asyncio.timeout(LIMIT_S), await asyncio.start_server(server.handle, host, 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        try:
            yield server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", kept
        finally:
            kept.close()


async def asked(kept: Connections, address: str, body: bytes = b"") -> bytes:
    async with kept.asked(address, "POST", "/x?q=%2F", [("x-own", "\xe9")], body) as answer:
        return await answer.rest()
