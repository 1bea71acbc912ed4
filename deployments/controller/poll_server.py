"""Answers the polls of replicas over their own connections; see `deployments.poll_line`.

A replica that stands still stops nobody: what it does not read waits in this process, and that is one
directive. The polls of a connection end with it.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import cast

import ray.util

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.poll_line import KEY_BYTES, Frames, PollAddress, Unanswered, frame
from deployments.protocol.instructions import Directive
from deployments.protocol.reports import Report

BACKLOG = 4096  # a fleet that comes back to a new controller at once
GREETING_S = 10.0  # for the key

Poll = Callable[[Report], Awaitable[Directive]]
logger = serve_logger()


class PollServer:
    """Listens on a port of its own once somebody asks where.

    Args:
        poll: answers a report.
        host: the address of this node in the cluster.
    """

    def __init__(self, poll: Poll, host: Callable[[], str] = ray.util.get_node_ip_address) -> None:
        self._poll = poll
        self._host = host
        self._key = secrets.token_bytes(KEY_BYTES)
        self._starting: asyncio.Task[PollAddress] | None = None
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()

    async def address(self) -> PollAddress:
        """Where it listens."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> PollAddress:
        host = self._host()
        listening = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Line(self._poll, self._key, self._lines), sock=listening, backlog=BACKLOG
        )
        return PollAddress(host=host, port=listening.getsockname()[1], key=self._key)

    def close(self) -> None:
        """Listen no more, and end every connection."""
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.close()


class _Line(asyncio.Protocol):
    """One replica's connection."""

    def __init__(self, poll: Poll, key: bytes, lines: set["_Line"]) -> None:
        self._poll = poll
        self._key = key
        self._lines = lines
        self._greeting = b""
        self._frames: Frames | None = None  # None until the key has come
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._loop = asyncio.get_running_loop()
        _notice_dead_hosts(transport.get_extra_info("socket"))
        self._lines.add(self)
        self._impatience = self._loop.call_later(GREETING_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            data = self._greeted(data)
        if self._frames is None:
            return
        try:
            for number, report in self._frames.feed(data):
                assert isinstance(report, Report)
                task = self._loop.create_task(self._answer(number, report))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        except Exception as error:  # whatever is wrong with it, what follows in it says nothing
            logger.warning("a replica's connection is closed: %s: %s", type(error).__name__, error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._impatience.cancel()
        self._lines.discard(self)
        for task in self._answering:
            task.cancel()

    def close(self) -> None:
        self._transport.abort()

    def _greeted(self, data: bytes) -> bytes:
        """What follows the key."""
        self._greeting += data[: KEY_BYTES - len(self._greeting)]
        rest = data[KEY_BYTES:] if len(data) > KEY_BYTES else b""
        if len(self._greeting) == KEY_BYTES:
            if not hmac.compare_digest(self._greeting, self._key):
                self._transport.abort()
                return b""
            self._impatience.cancel()
            self._frames = Frames()
        return rest

    async def _answer(self, number: int, report: Report) -> None:
        answer: Directive | Unanswered
        try:
            answer = await self._poll(report)
        except SlipstreamError as error:
            answer = Unanswered(reason=error.message)
        except Exception as error:  # the replica polls again, and this line goes on
            logger.exception("a poll of %s failed", report.replica_id)
            answer = Unanswered(reason=f"{type(error).__name__}: {error}")
        self._transport.write(frame(number, answer))


def _notice_dead_hosts(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
