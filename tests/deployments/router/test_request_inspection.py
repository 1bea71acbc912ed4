"""A request's body: bounded in size and in the time that its client takes."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from deployments.protocol.errors import BodyTooSlow, InvalidRequest, PayloadTooLarge
from deployments.router.prompt_lists import COMPLETIONS
from deployments.router.request_inspection import (
    BYTES_PER_S,
    MAX_HEADER_BYTES,
    MAX_SEQUENCES,
    check_headers,
    inspect,
    read_body,
)
from tests.deployments.routed_fleet import service

Headers = Sequence[tuple[bytes, bytes]]


def request(
    parts: Sequence[bytes] = (), pause_s: float = 0.0, ends: bool = True, headers: Headers = ()
) -> Request:
    """A request whose client waits before each part, and at last for ever if the body does not end."""
    left: Iterator[bytes] = iter(parts)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        part = next(left, None)
        if part is None and not ends:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_body_is_bounded() -> None:
    with pytest.raises(PayloadTooLarge):
        await read_body(request([b"ab", b"cd"]), 3)


async def test_incomplete_body_is_refused_after_its_time() -> None:
    with pytest.raises(BodyTooSlow, match="5 bytes in") as caught:
        await read_body(request([b"half "], ends=False), 100, grace_s=0.1)
    assert caught.value.status == 408 and caught.value.detail == {"received_bytes": 5}


async def test_time_limit_grows_with_the_body() -> None:
    part = bytes(BYTES_PER_S // 10)
    parts = [part] * 6  # which may take 0.6 s
    assert len(await read_body(request(parts, pause_s=0.05), 1 << 20, grace_s=0.1)) == 6 * len(part)


def count_of(body: bytes) -> int:
    return inspect(body, "POST", "/x", in_session=False).sequences


CHAT = [{"role": "user", "content": 'Say "n": 99 and {"prompt": ["a", "b"]}'}]


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({}, 1),
        ({"messages": CHAT, "n": 5}, 5),
        ({"messages": [CHAT] * 7, "n": 2}, 14),
        ({"prompt": [1, 2, 3], "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]], "n": "4"}, 8),
        ({"prompt": ["a"] * 9, "n": 2.0}, 18),
        ({"input": ["a"] * 5}, 5),
        ({"input": [*CHAT, {"type": "function_call_output", "call_id": "c", "output": "[1]"}] * 25}, 1),
        ({"query": "q", "documents": ["a"] * 6}, 6),
        ({"text_1": ["a"] * 2, "text_2": ["b"] * 3}, 3),
        ({"token_ids": [1, 2], "sampling_params": {"n": 12}}, 12),
        ({"n": None}, 1),
        ({"n": -3}, 1),
        ({"n": 1e400}, 1),
        ({"n": True}, 1),
        ({"prompt": []}, 1),
        ({"prompt": {"a": 1}, "n": []}, 1),
    ],
)
def test_sequences_are_prompts_times_answers(asked: dict[str, Any], count: int) -> None:
    for body in (json.dumps(asked).encode(), json.dumps(asked, indent=3).encode()):
        assert count_of(body) == count


def test_a_request_has_a_limited_number_of_sequences() -> None:
    assert count_of(b'{"n": %d}' % MAX_SEQUENCES) == MAX_SEQUENCES
    with pytest.raises(InvalidRequest, match=r"expected at most 16384 sequences .*, got 16385"):
        count_of(b'{"n": %d}' % (MAX_SEQUENCES + 1))


def test_no_spelling_hides_the_sequences() -> None:
    for body in (
        b'{"\\u006e": 99}',
        b'{"n": 1, "n": 99}',
        b'{"n":99}',
        '{"n": 99}'.encode("utf-16"),
        '{"n": 99}'.encode("utf-32-le"),
        b'{"sampling_params": {"n": 99}}',
        b'\xef\xbb\xbf{"n": 99}',
        b'{"n": 99, "a": NaN}',
        b'{"n": 99, "a": [-Infinity]}',
        b'{"a": "\\ud800", "n": 99}',
        b'{"n": 99, "\\ud86e": 1}',
    ):
        try:
            json.loads(body)
        except ValueError:
            continue  # vLLM cannot read it either
        assert count_of(body) == 99


def test_deep_nesting_is_refused_and_invalid_json_is_left_to_vllm() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        count_of(b'{"prompt": ' + b"[" * 100_000)
    for body in (b"", b"{", b"[1]", b'"n"', b'{"n": ' + b"9" * 10_000 + b"}", b"\xff\xfe\x00"):
        count_of(body)


@pytest.mark.slow
@given(st.binary(max_size=100) | st.text().map(str.encode))
def test_any_body_is_passed_or_refused(body: bytes) -> None:
    try:
        count_of(b'{"n": ' + body)
        count_of(body)
    except InvalidRequest:
        return


async def test_router_refuses_before_a_replica_is_asked() -> None:
    async with service("a") as (_, router, client):
        answer = await client.post("/whole", json={"prompt": ["a", "b", "c"], "n": 9999})
        assert (answer.status_code, answer.json()["error"]["detail"]) == (
            400,
            {"expected": 16384, "actual": 29997},
        )
        answer = await client.post("/whole", headers={"x-a": "b" * MAX_HEADER_BYTES})
        assert answer.status_code in (400, 413)  # the server in front of the router has a limit too
        answer = await client.post("/whole", headers={"x-session-id": "s" * 300})
        assert answer.status_code == 400
        assert router.in_flight == 0


def test_headers_have_a_limit() -> None:
    check_headers(request(headers=((b"x", b"y"),)))
    with pytest.raises(PayloadTooLarge, match="the headers must have at most"):
        check_headers(request(headers=((b"x", b"y" * MAX_HEADER_BYTES),)))


@pytest.mark.parametrize("name", [b"x-min-weight-version", b"x-weight-timeout", b"x-session-id"])
def test_header_of_ours_that_comes_twice_is_refused(name: bytes) -> None:
    check_headers(request(headers=((name, b"1"), (b"cookie", b"a"), (b"cookie", b"b"))))
    with pytest.raises(InvalidRequest, match=f"{name.decode()} must come once, got"):
        check_headers(request(headers=((name, b"1"), (name, b"2"))))


LIST = json.dumps({"prompt": [[1, 2], [3, 4]], "n": 3, "stream": True}).encode()


def test_session_and_what_is_no_standard_json_are_not_split() -> None:
    assert inspect(LIST, "POST", COMPLETIONS, in_session=True).prompts is None
    for body in (LIST.decode().encode("utf-16"), LIST.replace(b"}", b', "temperature": NaN}')):
        found = inspect(body, "POST", COMPLETIONS, in_session=False)
        assert (found.sequences, found.prompts) == (6, None)
