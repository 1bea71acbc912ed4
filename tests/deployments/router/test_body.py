"""A request's body: bounded in size and in the time that its client takes."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from starlette.requests import Request
from starlette.types import Message

from deployments.errors import BodyTooSlow, PayloadTooLarge
from deployments.router.body import BYTES_PER_S, read_body


def request(parts: Sequence[bytes], pause_s: float = 0.0, ends: bool = True) -> Request:
    """A request whose client waits before each part, and at last for ever if the body does not end."""
    left: Iterator[bytes] = iter(parts)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        part = next(left, None)
        if part is None and not ends:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_parts_are_one_body() -> None:
    assert await read_body(request([b"a", b"", b"bc"]), 3) == b"abc"


async def test_a_body_is_bounded() -> None:
    with pytest.raises(PayloadTooLarge):
        await read_body(request([b"ab", b"cd"]), 3)


async def test_a_client_that_stops_in_the_middle_keeps_no_place() -> None:
    with pytest.raises(BodyTooSlow, match="5 bytes in") as caught:
        await read_body(request([b"half "], ends=False), 100, grace_s=0.1)
    assert caught.value.status == 408 and caught.value.detail == {"received_bytes": 5}


async def test_a_client_that_sends_a_byte_now_and_then_keeps_no_place() -> None:
    with pytest.raises(BodyTooSlow):
        await read_body(request([b"x"] * 1000, pause_s=0.02), 10_000, grace_s=0.2)


async def test_a_large_body_has_the_time_that_it_needs() -> None:
    part = bytes(BYTES_PER_S // 10)
    parts = [part] * 6  # which may take 0.6 s
    assert len(await read_body(request(parts, pause_s=0.05), 1 << 20, grace_s=0.1)) == 6 * len(part)
