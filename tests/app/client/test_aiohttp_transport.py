"""The client's transport, against servers on sockets: what a request that failed may have done."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from app.client.aiohttp_transport import AiohttpTransport
from tests.free_ports import free_ports

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    made = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
    finally:
        made.close()


def client(url: str, *, most: int = 8, timeout_s: float = 5.0) -> httpx.AsyncClient:
    transport = AiohttpTransport(max_connections=most, kept_s=60.0)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=timeout_s)


async def asked(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(
        (int(each[15:]) for each in head.lower().splitlines() if each.startswith(b"content-length:")), 0
    )
    return head, await reader.readexactly(size)


async def test_a_request_and_its_answer_are_those_of_httpx() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await asked(reader))
            body = gzip.compress("grüße".encode())
            more = b"content-encoding: gzip\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nlocation: /b\r\n"
            writer.write(b"HTTP/1.1 302 Found\r\n" + more + b"content-length: %d\r\n\r\n" % len(body) + body)

    async with server(handler) as url, client(url) as http:
        for _ in range(2):
            answer = await http.post("/a%2Fb?c=%20d", json={"x": 1}, headers={"x-id": "1"})
    assert (answer.status_code, answer.text, answer.headers["location"]) == (302, "grüße", "/b")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    (head, body), _ = seen
    assert head.startswith(b"POST /a%2Fb?c=%20d HTTP/1.1\r\n") and body == b'{"x":1}'
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:-2]]
    assert len(names) == len(set(names)) and {b"x-id", b"user-agent", b"content-type"} <= set(names)


async def test_a_request_that_was_not_sent_is_told_from_one_that_may_have_been_done() -> None:
    async with client(f"http://127.0.0.1:{free_ports(1)[0]}") as http:
        with pytest.raises(httpx.ConnectError):
            await http.post("/", json={})

    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.close()

    async def says_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(HEAD + b"content-length: 9\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    async def says_other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(b"220 mail.example.com\r\n\r\n")

    for handler in (hangs_up, says_half, says_other):
        async with server(handler) as url, client(url) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post("/", json={})


@pytest.mark.parametrize("said", [b"", HEAD + b"content-length: 9\r\n\r\nhalf", None])
async def test_a_server_that_falls_silent_is_a_timeout(said: bytes | None) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if said is not None:  # else it does not read the body, as a process that was stopped
            await asked(reader)
            writer.write(said)

    async with server(handler) as url, client(url, timeout_s=0.2) as http:
        with pytest.raises(httpx.ReadTimeout):
            async with asyncio.timeout(5):
                await http.post("/", content=b"" if said is not None else bytes(1 << 25))


async def test_events_arrive_one_by_one_and_a_stream_that_is_left_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        assert not await reader.read()
        closed.set()

    async with server(handler) as url, client(url) as http:
        async with http.stream("POST", "/", json={}) as answer:
            assert await anext(answer.aiter_bytes()) == b"one"
        await asyncio.wait_for(closed.wait(), 5)


async def test_requests_beyond_the_limit_wait_for_a_connection() -> None:
    open_now, most = 0, 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            while True:
                await asked(reader)
                await asyncio.sleep(0.01)
                writer.write(HEAD + b"content-length: 1\r\n\r\nx")
        except asyncio.IncompleteReadError:
            open_now -= 1

    async with server(handler) as url, client(url, most=4) as http:
        answers = await asyncio.gather(*(http.post("/", json={}) for _ in range(40)))
    assert most == 4 and all(answer.text == "x" for answer in answers)
