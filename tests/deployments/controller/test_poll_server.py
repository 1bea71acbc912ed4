"""Polls over connections of their own: both ends, and what is between them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from deployments.controller.poll_server import PollServer
from deployments.errors import FleetUnavailable
from deployments.poll_line import KEY_BYTES, Frames, PollAddress, Polls, frame
from deployments.protocol.instructions import Connect, Directive, Instruction
from deployments.protocol.reports import Report

TOLD = Directive(
    admitted=True,
    instructions=(Instruction(seq=1, body=Connect(init_info={"a": "x" * 100_000}), deadline_s=1),),
)


def report(replica_id: str = "a", number: int = 1) -> Report:
    return Report(
        replica_id=replica_id,
        incarnation=replica_id,
        version=0,
        world_size=1,
        staged_round=None,
        number=number,
    )


class Scripted:
    """A controller that answers what the test says, and remembers who asked."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.cancelled = 0
        self.answer: Callable[[Report], Awaitable[Directive]] = self._told

    async def _told(self, report: Report) -> Directive:
        return TOLD

    async def poll(self, report: Report) -> Directive:
        self.reports.append(report)
        try:
            return await self.answer(report)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
async def server(scripted: Scripted) -> AsyncIterator[PollServer]:
    server = PollServer(scripted.poll, lambda: "127.0.0.1")
    yield server
    server.close()


async def never(report: Report) -> Directive:
    await asyncio.Event().wait()
    raise AssertionError


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not ready():
            await asyncio.sleep(0.005)


async def test_a_poll_is_answered_over_one_connection(server: PollServer, scripted: Scripted) -> None:
    asked = 0

    async def address() -> PollAddress:
        nonlocal asked
        asked += 1
        return await server.address()

    polls = Polls(address)
    for number in (1, 2):
        assert await polls.poll(report(number=number)) == TOLD
    assert asked == 1 and scripted.reports == [report(number=1), report(number=2)]
    polls.close()


async def test_an_error_of_the_controller_is_the_pollers(server: PollServer, scripted: Scripted) -> None:
    async def refuses(report: Report) -> Directive:
        raise FleetUnavailable("a newer poll superseded this one")

    scripted.answer = refuses
    polls = Polls(server.address)
    with pytest.raises(FleetUnavailable, match="superseded"):
        await polls.poll(report())
    scripted.answer = scripted._told
    assert await polls.poll(report()) == TOLD
    polls.close()


async def test_a_controller_that_ends_ends_the_poll_and_the_next_one_asks_where_its_successor_is(
    server: PollServer, scripted: Scripted
) -> None:
    successor = PollServer(scripted.poll, lambda: "127.0.0.1")
    addresses = [await server.address(), await successor.address()]
    scripted.answer = never

    async def address() -> PollAddress:
        return addresses.pop(0)

    polls = Polls(address)
    waiting = asyncio.create_task(polls.poll(report()))
    await until(lambda: bool(scripted.reports))
    server.close()
    with pytest.raises(FleetUnavailable, match="cannot be reached"):
        await asyncio.wait_for(waiting, 5)
    scripted.answer = scripted._told
    assert await polls.poll(report()) == TOLD
    polls.close()
    successor.close()


async def test_a_poll_without_an_answer_ends_with_its_time_and_its_connection(
    server: PollServer, scripted: Scripted
) -> None:
    scripted.answer = never
    polls = Polls(server.address, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        await polls.poll(report())
    await until(lambda: scripted.cancelled == 1)


async def test_a_poll_that_nobody_waits_for_leaves_the_connection_to_the_next_one(
    server: PollServer, scripted: Scripted
) -> None:
    polls = Polls(server.address)
    scripted.answer = never
    waiting = asyncio.create_task(polls.poll(report()))
    await until(lambda: bool(scripted.reports))
    waiting.cancel()
    scripted.answer = scripted._told
    assert await polls.poll(report(number=2)) == TOLD
    polls.close()


@pytest.mark.parametrize("greeting", [b"x" * KEY_BYTES, b"x"])
async def test_nothing_is_read_from_who_has_no_key(
    server: PollServer, scripted: Scripted, greeting: bytes
) -> None:
    address = await server.address()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(greeting + frame(1, report()))
    if len(greeting) < KEY_BYTES:
        writer.write_eof()
    with pytest.raises(ConnectionResetError):  # or an end without an answer
        assert await asyncio.wait_for(reader.read(), 5) == b""
        raise ConnectionResetError
    assert not scripted.reports


async def test_the_key_and_a_frame_may_come_byte_by_byte(server: PollServer, scripted: Scripted) -> None:
    address = await server.address()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    for byte in address.key + frame(7, report()):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    frames = Frames()
    answers: list[tuple[int, object]] = []
    while not answers:
        answers += frames.feed(await asyncio.wait_for(reader.read(100), 5))
    assert answers == [(7, TOLD)]
    writer.close()


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        list(Frames().feed(b"\xff" * 8))
