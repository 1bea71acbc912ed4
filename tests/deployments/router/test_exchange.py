"""A request and its answer over real connections, on asyncio's event loop and on the one that Serve uses."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.router.connections import Connections
from deployments.router.exchange import MAX_WAITING_BYTES, ExchangeLost
from tests.deployments.router.replica_server import OK, Run, asked, both_loops, says, serving

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-One: 1\r\n\r\n"
EVENTS = [b"data: %d\n\n" % number for number in range(5)]
STREAM = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in EVENTS)
END = b"0\r\n\r\n"
LATE = says(CHUNKED, STREAM.removeprefix(CHUNKED))  # its body comes to one who waits for it


async def passed_on(kept: Connections, address: str, take: Callable[[bytes], Any]) -> None:
    async with kept.asked(address, "POST", "/", [], b"") as answer:
        await answer.pass_on(take)


@pytest.mark.slow
@both_loops
def test_an_answer_is_whole_however_it_is_torn_and_its_connection_is_used_again(run: Run) -> None:
    async def scene() -> None:
        whole = STREAM + END
        for torn in ([whole], [whole[index : index + 1] for index in range(len(whole))]):
            async with serving(says(*torn)) as (server, address, kept):
                for _ in range(2):
                    async with kept.asked(address, "POST", "/", [], b"") as answer:
                        first = await answer.piece()
                        assert (answer.status, answer.content_length) == (200, None)
                        assert answer.headers == [(b"transfer-encoding", b"chunked"), (b"x-one", b"1")]
                        assert first + await answer.rest() == b"".join(EVENTS)
                    taken: list[bytes] = []

                    async def take(piece: bytes) -> None:
                        taken.append(piece)  # noqa: B023  # of this turn

                    await passed_on(kept, address, take)
                    assert b"".join(taken) == b"".join(EVENTS)
                assert server.accepted == 1

    run(scene())


@both_loops
def test_a_request_arrives_as_it_was_asked(run: Run) -> None:
    async def scene() -> None:
        async with serving(says(OK)) as (server, address, kept):
            bodies = [b"", b"hello", bytes(range(256)) * 20_000]
            for body in bodies:
                assert await asked(kept, address, body) == b"ok"
            async with kept.asked(address, "GET", "/", [], b"") as answer:
                await answer.rest()
            assert [body for _, body in server.requests] == [*bodies, b""]
            expected = (
                f"POST /x?q=%2F HTTP/1.1\r\nhost: {address}\r\nx-own: \xe9\r\ncontent-length: 5\r\n\r\n"
            )
            assert server.requests[1][0] == expected.encode("latin-1")
            assert b"content-length" not in server.requests[3][0]

    run(scene())


@pytest.mark.parametrize("smuggled", ["a\r\nx-slipstream-key: guess", "a\nb", "a\rb"])
async def test_no_header_can_hide_another_one(smuggled: str) -> None:
    async with serving(says(OK)) as (server, address, kept):
        for target, headers in [("/", [("x-own", smuggled)]), (f"/{smuggled}", [])]:
            with pytest.raises(ValueError, match="without line breaks"):
                async with kept.asked(address, "POST", target, headers, b""):
                    pass
        assert server.requests == []


@pytest.mark.slow
@both_loops
def test_who_takes_slowly_holds_up_the_sender_and_gets_everything_in_order(run: Run) -> None:
    async def scene() -> None:
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

        async with serving(writes) as (_, address, kept):
            goes_on, taken = asyncio.Event(), bytearray()

            async def take(piece: bytes) -> None:
                await goes_on.wait()
                taken.extend(piece)

            passing = asyncio.create_task(passed_on(kept, address, take))
            before = -1
            while sent != before:  # until the sender stands
                before = sent
                await asyncio.sleep(0.3)
            assert sent < count and not passing.done()
            goes_on.set()
            await passing
            assert bytes(taken) == b"".join(b"%06d" % number + chunk for number in range(count))

    assert MAX_WAITING_BYTES < 400 * 60_000
    run(scene())


@both_loops
def test_what_the_taker_raises_ends_the_request(run: Run) -> None:
    async def scene() -> None:
        for waits, writes in [(False, LATE), (True, LATE), (True, says(STREAM))]:
            async with serving(writes) as (server, address, kept):

                async def take(piece: bytes) -> None:
                    if waits:  # noqa: B023  # of this turn
                        await asyncio.sleep(0.01)
                    raise BrokenPipeError("gone")

                with pytest.raises(BrokenPipeError, match="gone"):
                    await passed_on(kept, address, take)
                await server.until_ended(1)

    run(scene())


@both_loops
def test_who_leaves_while_a_piece_is_taken_cancels_that_too(run: Run) -> None:
    async def scene() -> None:
        async with serving(LATE) as (server, address, kept):
            waits, cancelled = asyncio.Event(), asyncio.Event()

            async def take(piece: bytes) -> None:
                waits.set()
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

            passing = asyncio.create_task(passed_on(kept, address, take))
            await waits.wait()
            await asyncio.sleep(0.05)
            passing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await passing
            assert cancelled.is_set()
            await server.until_ended(1)

    run(scene())


@pytest.mark.parametrize("closes", [STREAM, STREAM + b"9\r\ndata"], ids=["between events", "in an event"])
async def test_a_stream_that_breaks_gives_what_had_come_and_then_says_so(closes: bytes) -> None:
    async with serving(says(closes, closes=True)) as (_, address, kept):
        taken: list[bytes] = []

        async def take(piece: bytes) -> None:
            taken.append(piece)

        with pytest.raises(ExchangeLost, match="closed"):
            await passed_on(kept, address, take)
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
async def test_what_is_no_answer_is_lost_with_a_reason(answer: bytes, reason: str) -> None:
    async with serving(says(answer, closes=True)) as (_, address, kept):
        with pytest.raises(ExchangeLost, match=reason):
            await asked(kept, address)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_answers_of_another_shape(answer: bytes, body: bytes) -> None:
    async with serving(says(answer)) as (server, address, kept):
        for _ in range(2):
            async with kept.asked(address, "POST", "/", [], b"") as got:
                assert await got.rest() == body and (b"link", b"a") not in got.headers
        assert server.accepted == 1


async def test_who_leaves_early_ends_the_connection() -> None:
    async with serving(says(STREAM)) as (server, address, kept):
        async with kept.asked(address, "POST", "/", [], b"") as answer:
            await answer.piece()
        await server.until_ended(1)


async def test_who_is_given_up_says_so_to_the_one_who_reads() -> None:
    async with serving(says(STREAM)) as (server, address, kept):
        with pytest.raises(ExchangeLost, match="given up"):
            async with kept.asked(address, "POST", "/", [], b"") as answer:
                asyncio.get_running_loop().call_later(0.05, answer.close)
                await answer.rest()
        await server.until_ended(1)
