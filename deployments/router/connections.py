"""The router's connections to the replicas, and how it notices that a silent replica is gone.

    request ─► no byte for SILENCE_S ─► does the replica's server answer anything? ─► yes: wait on
                                                                                  └─► no: give up

Silence alone says nothing: an answer that is not streamed takes as long as its generation. A process that has
ended closes its connections and needs none of this; one that is stopped, or whose host is cut off, does not.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp

from deployments.router.exchange import Answer, Connection

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 15.0  # a connection that nobody has used for so long is closed; a replica keeps it for longer
SOCKET_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


class NotConnected(Exception):
    """There is no connection to a replica, which has had nothing of the request."""


class Connections:
    """Connections that are kept for the next request to the same replica; as many as are needed."""

    def __init__(self) -> None:
        self._idle: dict[str, dict[Connection, asyncio.TimerHandle]] = {}
        self._closed = False

    @asynccontextmanager
    async def asked(
        self, address: str, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncIterator[Answer]:
        """The answer to a request, once it has begun. Leaving early ends the connection and the request.

        Args:
            address: host:port of the replica's server.
            headers: without `host` and `content-length`.

        Raises:
            NotConnected: the request was not sent.
            ExchangeLost: the answer did not begin.
        """
        connection, is_kept = self._kept(address) or await _connected(address), False
        try:
            answer = connection.ask(method, target, [("host", address), *headers], body)
            await answer.begin()
            yield answer
            is_kept = answer.is_complete and answer.keeps_connection
        finally:
            if is_kept:
                self._keep(address, connection)
            else:
                connection.abort()

    def close(self) -> None:
        """Close those that are idle, and each other one when its request ends."""
        self._closed = True
        for kept in self._idle.values():
            for connection, timer in kept.items():
                timer.cancel()
                connection.abort()
        self._idle.clear()

    def _kept(self, address: str) -> Connection | None:
        """The one that was used last: the others may end."""
        kept = self._idle.get(address)
        while kept:
            connection, timer = kept.popitem()
            timer.cancel()
            if connection.is_open:
                return connection
        self._idle.pop(address, None)
        return None

    def _keep(self, address: str, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, address, connection)
        self._idle.setdefault(address, {})[connection] = timer

    def _expire(self, address: str, connection: Connection) -> None:
        connection.abort()
        kept = self._idle[address]
        del kept[connection]
        if not kept:
            del self._idle[address]


def questions() -> aiohttp.ClientSession:
    """For questions of the router's own. Without a limit of connections or of time: the question has one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def _connected(address: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, connection = await asyncio.get_running_loop().create_connection(
                Connection, host.strip("[]"), int(port)
            )
    except (OSError, TimeoutError) as error:
        raise NotConnected(f"{type(error).__name__}: {error}") from error
    _watch(transport.get_extra_info("socket"))
    return connection


def _watch(connected: socket.socket) -> None:
    """It notices a dead host, whether it waits or sends; a dead process closes its connections."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in SOCKET_OPTIONS.items():
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


SILENCE_S = 30.0
PROBE_TIMEOUT_S = 30.0  # a replica that reads a long list of prompts may be busy for seconds


class Heard(Protocol):
    """Something that arrives.

    Attributes:
        heard_at: the event loop's time at which a byte came last.
    """

    heard_at: float


class Patience:
    """The wait for one answer.

    Args:
        alive: asks the replica; False: it does not answer.
        give_up: called once, when the replica is gone.
    """

    def __init__(
        self, alive: Callable[[], Awaitable[bool]], give_up: Callable[[], None], silence_s: float
    ) -> None:
        self._alive = alive
        self.give_up = give_up
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._source: Heard | None = None
        self._timer = self._loop.call_later(silence_s, self._look)
        self._asking: asyncio.Task[None] | None = None

    def follow(self, source: Heard) -> None:
        """The answer has begun, and arrives by `source`."""
        self._source = source

    def close(self) -> None:
        """The answer is complete, or nobody waits for it."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        left_s = self._heard_at() + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        heard_at = self._heard_at()
        if await self._alive() or self._heard_at() != heard_at:
            self._timer = self._loop.call_later(self._silence_s, self._look)
        else:
            self.give_up()

    def _heard_at(self) -> float:
        return self._began if self._source is None else self._source.heard_at


class Probes:
    """One question to a replica at a time, whoever waits for it."""

    def __init__(self, ask: Callable[[str, str], Awaitable[bool]]) -> None:
        self._ask = ask
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def alive(self, address: str, key: str) -> bool:
        """Whether a replica's server answers."""
        running = self._running.get(address)
        if running is None:
            running = asyncio.ensure_future(self._ask(address, key))
            self._running[address] = running
            running.add_done_callback(lambda _: self._running.pop(address, None))
        return await asyncio.shield(running)
