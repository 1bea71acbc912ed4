"""What one request may ask for, and how it is refused."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.router.bounds import MAX_HEADER_BYTES, check_headers, check_sequences, sequences
from tests.deployments.routed_fleet import service

CHAT = [{"role": "user", "content": 'Say "n": 99 and {"prompt": ["a", "b"]}'}]


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({}, 1),
        ({"messages": CHAT * 50}, 1),
        ({"messages": CHAT, "n": 5}, 5),
        ({"messages": [CHAT] * 7, "n": 2}, 14),
        ({"messages": [CHAT] * 7}, 7),
        ({"prompt": "text"}, 1),
        ({"prompt": [1, 2, 3], "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]], "n": "4"}, 8),
        ({"prompt": ["a"] * 9, "n": 2.0}, 18),
        ({"input": ["a"] * 5}, 5),
        ({"query": "q", "documents": ["a"] * 6}, 6),
        ({"text_1": ["a"] * 2, "text_2": ["b"] * 3}, 3),
        ({"token_ids": [1, 2], "sampling_params": {"n": 12}}, 12),
        ({"n": None}, 1),
        ({"n": -3}, 1),
        ({"n": "many"}, 1),
        ({"n": 1e400}, 1),
        ({"n": True}, 1),
        ({"prompt": []}, 1),
        ({"prompt": {"a": 1}, "n": []}, 1),
    ],
)
def test_sequences_are_prompts_times_answers(asked: dict[str, Any], count: int) -> None:
    assert sequences(asked) == count
    for body in (json.dumps(asked).encode(), json.dumps(asked, indent=3).encode()):
        check_sequences(body, count)
        if count > 1:
            with pytest.raises(
                InvalidRequest, match=rf"expected at most {count - 1} sequences .*, got {count}"
            ):
                check_sequences(body, count - 1)


def test_no_spelling_hides_them() -> None:
    for body in (
        b'{"\\u006e": 99}',
        b'{"n": 1, "n": 99}',
        b'{"n":99}',
        '{"n": 99}'.encode("utf-16"),
        '{"n": 99}'.encode("utf-32-le"),
        b'{"sampling_params": {"n": 99}}',
        b'\xef\xbb\xbf{"n": 99}',
    ):
        try:
            json.loads(body)
        except ValueError:
            continue  # vLLM cannot read it either
        with pytest.raises(InvalidRequest, match="got 99"):
            check_sequences(body, 8)


def test_what_nests_without_end_is_refused_and_what_is_no_json_is_vllms() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        check_sequences(b'{"prompt": ' + b"[" * 100_000, 8)
    for body in (b"", b"{", b"[1]", b'"n"', b'{"n": ' + b"9" * 10_000 + b"}", b"\xff\xfe\x00"):
        check_sequences(body, 8)


@given(st.binary(max_size=100) | st.text().map(str.encode) | st.from_type(dict).map(str).map(str.encode))
def test_any_body_is_passed_or_refused(body: bytes) -> None:
    try:
        check_sequences(b'{"n": ' + body, 8)
        check_sequences(body, 8)
    except InvalidRequest:
        return


async def test_the_router_refuses_before_a_replica_is_asked() -> None:
    async with service("a") as (_, router, client):
        answer = await client.post("/whole", json={"prompt": ["a", "b", "c"], "n": 3})
        assert (answer.status_code, answer.json()["error"]["detail"]) == (400, {"expected": 8, "actual": 9})
        answer = await client.post("/whole", headers={"x-a": "b" * MAX_HEADER_BYTES})
        assert answer.status_code in (400, 413)  # the server in front of the router has a limit too
        answer = await client.post("/whole", headers={"x-session-id": "s" * 300})
        assert answer.status_code == 400
        assert router.in_flight == 0


def request(*parts: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Request:
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def test_headers_have_a_limit() -> None:
    check_headers(request(headers=((b"x", b"y"),)))
    with pytest.raises(PayloadTooLarge, match="the headers must have at most"):
        check_headers(request(headers=((b"x", b"y" * MAX_HEADER_BYTES),)))
