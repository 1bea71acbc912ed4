"""The client for replicas over real connections, on asyncio's event loop and on the one that Serve uses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from deployments.router import http_client
from deployments.router.http_client import (
    MAX_UNREAD_BYTES,
    SOCKET_OPTIONS,
    ConnectionPool,
    NotConnected,
    ResponseLost,
)
from tests.waiting import reached

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT_S = 10.0

Serving = tuple["Server", str, ConnectionPool]
Writes = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the event loop of asyncio and on Serve's."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def on_loop(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        run(test())

    on_loop.__name__ = test.__name__
    return on_loop


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
        await reached(lambda: self.ended >= count)


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
async def serving(writes: Writes, host: str = "127.0.0.1") -> AsyncIterator[Serving]:
    server, pool = Server(writes), ConnectionPool()
    async with asyncio.timeout(LIMIT_S), await asyncio.start_server(server.handle, host, 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        try:
            yield server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", pool
        finally:
            pool.close()


async def post(pool: ConnectionPool, address: str, body: bytes = b"") -> bytes:
    async with pool.request(address, "POST", "/x?q=%2F", [("x-own", "\xe9")], body) as answer:
        return await answer.rest()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-One: 1\r\n\r\n"
EVENTS = [b"data: %d\n\n" % number for number in range(5)]
STREAM = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in EVENTS)
END = b"0\r\n\r\n"
LATE = says(CHUNKED, STREAM.removeprefix(CHUNKED))  # its body comes to one who waits for it


async def pass_on(
    pool: ConnectionPool, address: str, take: Callable[[bytes], Any], *, joined: bool = True
) -> None:
    async with pool.request(address, "POST", "/", [], b"") as answer:
        await answer.pass_on(take, joined=joined)


@both_loops
async def test_a_piece_is_of_one_chunk_if_they_are_not_joined() -> None:
    """Also those that came before, or while the one that takes them was busy."""
    for joined, least in ((False, len(EVENTS)), (True, 1)):
        async with serving(says(STREAM + END)) as (_, address, pool):
            taken: list[bytes] = []

            async def take(piece: bytes) -> None:
                taken.append(piece)  # noqa: B023  # of this turn
                await asyncio.sleep(0)

            await pass_on(pool, address, take, joined=joined)
            assert b"".join(taken) == b"".join(EVENTS) and least <= len(taken) <= least + joined


@pytest.mark.slow
@both_loops
async def test_response_torn_into_any_pieces_is_complete_and_its_connection_is_reused() -> None:
    whole = STREAM + END
    for torn in ([whole], [whole[index : index + 1] for index in range(len(whole))]):
        async with serving(says(*torn)) as (server, address, pool):
            for _ in range(2):
                async with pool.request(address, "POST", "/", [], b"") as answer:
                    first = await answer.piece()
                    assert (answer.status, answer.content_length) == (200, None)
                    assert answer.headers == [(b"transfer-encoding", b"chunked"), (b"x-one", b"1")]
                    assert first + await answer.rest() == b"".join(EVENTS)
                taken: list[bytes] = []

                async def take(piece: bytes) -> None:
                    taken.append(piece)  # noqa: B023  # of this turn

                await pass_on(pool, address, take)
                assert b"".join(taken) == b"".join(EVENTS)
            assert server.accepted == 1


@both_loops
async def test_request_arrives_as_it_was_sent() -> None:
    async with serving(says(OK)) as (server, address, pool):
        bodies = [b"", b"hello", bytes(range(256)) * 20_000]
        for body in bodies:
            assert await post(pool, address, body) == b"ok"
        async with pool.request(address, "GET", "/", [], b"") as answer:
            await answer.rest()
        assert [body for _, body in server.requests] == [*bodies, b""]
        expected = f"POST /x?q=%2F HTTP/1.1\r\nhost: {address}\r\nx-own: \xe9\r\ncontent-length: 5\r\n\r\n"
        assert server.requests[1][0] == expected.encode("latin-1")
        assert b"content-length" not in server.requests[3][0]


@pytest.mark.parametrize("smuggled", ["a\r\nx-slipstream-key: guess", "a\nb", "a\rb"])
async def test_line_break_in_header_or_target_is_refused(smuggled: str) -> None:
    async with serving(says(OK)) as (server, address, pool):
        for target, headers in [("/", [("x-own", smuggled)]), (f"/{smuggled}", [])]:
            with pytest.raises(ValueError, match="without line breaks"):
                async with pool.request(address, "POST", target, headers, b""):
                    pass
        assert server.requests == []


@pytest.mark.slow
@both_loops
async def test_slow_reader_blocks_the_sender_and_gets_everything_in_order() -> None:
    chunk, count, sent = b"x" * 60_000, 400, 0

    async def writes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        await asyncio.sleep(0.1)  # somebody waits for the first piece
        for number in range(count):
            piece = b"%06d" % number + chunk
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            sent += 1
        writer.write(END)

    async with serving(writes) as (_, address, pool):
        goes_on, taken = asyncio.Event(), bytearray()

        async def take(piece: bytes) -> None:
            await goes_on.wait()
            taken.extend(piece)

        passing = asyncio.create_task(pass_on(pool, address, take))
        before = -1
        while sent != before:  # until the sender stands
            before = sent
            await asyncio.sleep(0.3)
        assert sent < count and not passing.done()
        goes_on.set()
        await passing
        assert bytes(taken) == b"".join(b"%06d" % number + chunk for number in range(count))


@both_loops
async def test_exception_of_take_closes_the_connection() -> None:
    for waits, writes in [(False, LATE), (True, LATE), (True, says(STREAM))]:
        async with serving(writes) as (server, address, pool):

            async def take(piece: bytes) -> None:
                if waits:  # noqa: B023  # of this turn
                    await asyncio.sleep(0.01)
                raise BrokenPipeError("gone")

            with pytest.raises(BrokenPipeError, match="gone"):
                await pass_on(pool, address, take)
            await server.until_ended(1)


@both_loops
async def test_cancellation_reaches_take_while_it_blocks() -> None:
    async with serving(LATE) as (server, address, pool):
        waits, cancelled = asyncio.Event(), asyncio.Event()

        async def take(piece: bytes) -> None:
            waits.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        passing = asyncio.create_task(pass_on(pool, address, take))
        await waits.wait()
        await asyncio.sleep(0.05)
        passing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing
        assert cancelled.is_set()
        await server.until_ended(1)


@pytest.mark.parametrize("closes", [STREAM, STREAM + b"9\r\ndata"], ids=["between events", "in an event"])
async def test_broken_stream_delivers_what_had_arrived_and_then_raises(closes: bytes) -> None:
    async with serving(says(closes, closes=True)) as (_, address, pool):
        taken: list[bytes] = []

        async def take(piece: bytes) -> None:
            taken.append(piece)

        with pytest.raises(ResponseLost, match="closed"):
            await pass_on(pool, address, take)
        assert b"".join(taken).startswith(b"".join(EVENTS))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-le", "closed"),
        (b"hello\r\n\r\n", "HTTP/"),
        (b"HTTP/1.1 200 OK\r\n\r\nall of it", "could not be told from a broken connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "(?i)content-length"),
        (CHUNKED + b"zz\r\n", "(?i)chunk size"),
        (OK[:-1], "closed"),
    ],
)
async def test_malformed_or_truncated_response_is_lost_with_a_reason(answer: bytes, reason: str) -> None:
    async with serving(says(answer, closes=True)) as (_, address, pool):
        with pytest.raises(ResponseLost, match=reason):
            await post(pool, address)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_informational_and_empty_responses(answer: bytes, body: bytes) -> None:
    async with serving(says(answer)) as (server, address, pool):
        for _ in range(2):
            async with pool.request(address, "POST", "/", [], b"") as got:
                assert await got.rest() == body and (b"link", b"a") not in got.headers
        assert server.accepted == 1


async def test_leaving_early_closes_the_connection() -> None:
    async with serving(says(STREAM)) as (server, address, pool):
        async with pool.request(address, "POST", "/", [], b"") as answer:
            await answer.piece()
        await server.until_ended(1)


@both_loops
async def test_a_reader_who_leaves_what_has_arrived_does_not_block_the_next_request() -> None:
    """The last byte pauses the connection, and completes the response."""
    length = MAX_UNREAD_BYTES + 1
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + b"x" * length
    async with serving(says(whole)) as (_, address, pool):
        async with pool.request(address, "GET", "/", [], b"") as response:
            await reached(lambda: response.is_complete)
        assert len(await post(pool, address)) == length


async def test_reader_of_a_given_up_response_gets_the_reason() -> None:
    async with serving(says(STREAM)) as (server, address, pool):
        with pytest.raises(ResponseLost, match="stalled"):
            async with pool.request(address, "POST", "/", [], b"") as answer:
                asyncio.get_running_loop().call_later(0.05, answer.give_up, "stalled")
                await answer.rest()
        await server.until_ended(1)


@pytest.mark.parametrize(
    "answer",
    [OK + OK, OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), OK.replace(b"1.1", b"1.0", 1)],
    ids=["two answers", "connection: close", "HTTP/1.0"],
)
async def test_connection_that_may_not_be_reused_is_closed(answer: bytes) -> None:
    async with serving(says(answer)) as (server, address, pool):
        assert [await post(pool, address) for _ in range(2)] == [b"ok"] * 2
        await server.until_ended(2)
        assert server.accepted == 2


async def test_connection_is_not_reused_if_the_response_came_before_the_request_was_sent() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        writer.close()

    pool = ConnectionPool()
    async with asyncio.timeout(LIMIT_S), await asyncio.start_server(early, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        assert await post(pool, address, b"x" * 50_000_000) == b"ok"
        assert not pool._idle
        pool.close()


async def test_idle_connections_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_S", 0.1)
    async with serving(says(OK)) as (server, address, pool):
        await asyncio.gather(*[post(pool, address) for _ in range(3)])
        assert len(pool._idle[address]) == server.accepted == 3
        await server.until_ended(3)
        assert not pool._idle
        assert await post(pool, address) == b"ok" and server.accepted == 4


async def test_connection_closed_by_the_replica_is_not_reused() -> None:
    async with serving(says(OK, closes=True)) as (server, address, pool):
        for count in range(1, 4):
            assert await post(pool, address) == b"ok"
            await server.until_ended(count)
            await asyncio.sleep(0.05)


async def test_refused_connection_is_not_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(NotConnected, match="ConnectionRefusedError"):
        await post(ConnectionPool(), address)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_ipv6_address() -> None:
    async with serving(says(OK), "::1") as (_, address, pool):
        assert await post(pool, address) == b"ok"


@both_loops
async def test_connections_have_keepalive_options() -> None:
    async with serving(says(OK)) as (_, address, pool):
        await post(pool, address)
        (connection,) = pool._idle[address]
        used = connection._transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name, value in SOCKET_OPTIONS.items():
            assert used.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
