"""Which connections to a replica are used again, and which end."""

import asyncio
import socket

import pytest

from deployments.router import connections as module
from deployments.router.connections import SOCKET_OPTIONS, Connections, NotConnected
from tests.deployments.router.replica_server import LIMIT_S, OK, Run, asked, both_loops, says, serving


@pytest.mark.parametrize(
    "answer",
    [OK + OK, OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), OK.replace(b"1.1", b"1.0", 1)],
    ids=["two answers", "connection: close", "HTTP/1.0"],
)
async def test_a_connection_that_may_not_be_used_again_is_closed(answer: bytes) -> None:
    async with serving(says(answer)) as (server, address, kept):
        assert [await asked(kept, address) for _ in range(2)] == [b"ok"] * 2
        await server.until_ended(2)
        assert server.accepted == 2


async def test_nor_is_one_whose_answer_came_before_the_question_was_whole() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        writer.close()

    kept = Connections()
    async with asyncio.timeout(LIMIT_S), await asyncio.start_server(early, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        assert await asked(kept, address, b"x" * 50_000_000) == b"ok"
        assert not kept._idle
        kept.close()


async def test_idle_connections_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    async with serving(says(OK)) as (server, address, kept):
        await asyncio.gather(*[asked(kept, address) for _ in range(3)])
        assert len(kept._idle[address]) == server.accepted == 3
        await server.until_ended(3)
        assert not kept._idle
        assert await asked(kept, address) == b"ok" and server.accepted == 4


async def test_a_connection_that_the_replica_has_closed_is_not_used() -> None:
    async with serving(says(OK, closes=True)) as (server, address, kept):
        for count in range(1, 4):
            assert await asked(kept, address) == b"ok"
            await server.until_ended(count)
            await asyncio.sleep(0.05)


async def test_where_nobody_listens_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(NotConnected, match="ConnectionRefusedError"):
        await asked(Connections(), address)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_an_address_of_ipv6() -> None:
    async with serving(says(OK), "::1") as (_, address, kept):
        assert await asked(kept, address) == b"ok"


@both_loops
def test_a_dead_host_is_noticed(run: Run) -> None:
    async def scene() -> None:
        async with serving(says(OK)) as (_, address, kept):
            await asked(kept, address)
            (connection,) = kept._idle[address]
            used = connection._transport.get_extra_info("socket")
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for name, value in SOCKET_OPTIONS.items():
                assert used.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value

    run(scene())
