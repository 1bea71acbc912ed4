import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client import calls
from app.client.completions import complete, join
from app.client.connection import AsyncFleetClient, Call, FleetClient, FleetError, token_from
from tests.app.fake_answers import client_of, refusal

HEALTH = {"status": "ok", "serving": 2, "members": 2, "weight_version": 3, "of a newer fleet": 1}
Reply = httpx.Response | Exception


def handler(*replies: Reply) -> Callable[[httpx.Request], httpx.Response]:
    left = list(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        reply = left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return handle


def patient(*replies: Reply) -> AsyncFleetClient:
    return client_of(handler(*replies), patience_s=60.0, retry_pause_s=0.0)


def blocking(*replies: Reply) -> FleetClient:
    transport = httpx.MockTransport(handler(*replies))
    return FleetClient(httpx.Client(transport=transport, base_url="http://fleet"))


def ok(body: object = HEALTH) -> httpx.Response:
    return httpx.Response(200, json=body)


def busy(retry_after: str = "0") -> httpx.Response:
    headers = {"retry-after": retry_after}
    return httpx.Response(503, headers=headers, json={"error": {"message": "no replica"}})


async def test_a_fleet_that_is_short_of_replicas_is_asked_again() -> None:
    async with patient(busy(), busy("Sat, 28 Nov 2026 21:00:00 GMT"), ok()) as client:  # a proxy's
        assert (await client.send(calls.health())).status == "ok"


async def test_no_answer_makes_a_call_wait_longer_than_its_patience() -> None:
    async with client_of(handler(busy("1e9"), busy()), patience_s=0.01) as client:
        with pytest.raises(FleetError, match="503"):
            await asyncio.wait_for(client.send(calls.health()), 20)


async def test_a_call_without_patience_takes_the_first_answer() -> None:
    async with patient(busy(), ok()) as client:
        with pytest.raises(FleetError, match="GET /health: 503: no replica"):
            await client.send(calls.health(), patient=False)
    with pytest.raises(FleetError, match="GET /health: 503: no replica"):
        blocking(busy()).send(calls.health())


def without_router(status: int = 500) -> httpx.Response:
    """What HAProxy sends with the configuration of Ray 2.60 while a router restarts."""
    return httpx.Response(status, text="Internal Server Error")


async def test_a_lost_connection_is_tried_again() -> None:
    lost = httpx.ConnectError("refused"), httpx.ReadError("gone"), without_router(), without_router(502)
    async with patient(*lost, ok()) as client:
        assert (await client.send(calls.health())).status == "ok"


@pytest.mark.parametrize("call", [calls.step([]), calls.publish(), calls.save(), calls.rollback(3)])
async def test_a_call_that_may_have_been_carried_out_is_not_repeated(call: Call[Any]) -> None:
    async with patient(httpx.ReadError("gone"), without_router(), ok({})) as client:
        for reason in ("gone", "500: Internal Server Error"):
            with pytest.raises(
                FleetError, match=rf"no server answers at http://fleet \({reason}\)"
            ) as caught:
                await client.send(call)
            assert caught.value.status is None


async def test_a_step_that_never_reached_the_fleet_is_sent_again() -> None:
    async with patient(httpx.ConnectError("refused"), ok({"loss": 0.5})) as client:
        assert await client.send(calls.step([])) == {"loss": 0.5}


@pytest.mark.parametrize(
    ("answer", "text", "message", "kind"),
    [
        (
            refusal(409, "conflict", "a round is open"),
            "POST /resume: 409: a round is open",
            "a round is open",
            "conflict",
        ),
        (httpx.Response(400, text="no such model"), "POST /resume: 400: no such model", "no such model", ""),
        (httpx.Response(500, json=["x"]), 'POST /resume: 500: ["x"]', '["x"]', ""),
    ],
)
async def test_a_refusal_has_the_fleets_own_explanation(
    answer: httpx.Response, text: str, message: str, kind: str
) -> None:
    with pytest.raises(FleetError) as caught:
        blocking(answer).send(calls.resume())
    error = caught.value
    assert (str(error), error.message, error.status, error.type) == (text, message, answer.status_code, kind)


@pytest.mark.parametrize("answer", [httpx.Response(200, text="<html>"), ok({"serving": 1}), ok([])])
def test_an_answer_of_something_else_is_an_error(answer: httpx.Response) -> None:
    with pytest.raises(FleetError, match="GET /health: the answer cannot be read"):
        blocking(answer).send(calls.health())


def test_a_fleet_that_is_not_there_is_named_by_its_address() -> None:
    with pytest.raises(FleetError) as caught:
        blocking(httpx.ConnectError("refused")).send(calls.fleet())
    assert str(caught.value) == "no server answers at http://fleet (refused)"
    assert (caught.value.message, caught.value.status) == (str(caught.value), None)


def test_the_token_comes_from_the_environment() -> None:
    assert token_from({"SLIPSTREAM_TOKEN": " s3cret\n"}) == "s3cret"
    assert token_from({"SLIPSTREAM_TOKEN": " "}) is None and token_from({}) is None
    with FleetClient.connect("http://fleet/", "s3cret") as client:
        assert client.http.headers["authorization"] == "Bearer s3cret"
        assert str(client.http.base_url) == "http://fleet"


def test_a_token_file_is_read_and_an_operators_token_goes_before_a_users(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    given = {"SLIPSTREAM_TOKEN_FILE": str(file), "SLIPSTREAM_USER_TOKEN": "user"}
    assert token_from(given) == "new"
    assert token_from(given | {"SLIPSTREAM_TOKEN": "operator"}) == "operator"
    assert token_from({"SLIPSTREAM_USER_TOKEN": "user"}) == "user"
    with pytest.raises(FleetError, match="SLIPSTREAM_TOKEN_FILE: expected a readable file"):
        token_from({"SLIPSTREAM_TOKEN_FILE": str(tmp_path / "none")})


def test_a_token_in_the_address_is_carried_and_never_shown() -> None:
    with FleetClient.connect("http://x:s3cret@127.0.0.1:1/", "other") as client:
        assert client.http.headers["authorization"] == "Bearer s3cret"
        with pytest.raises(FleetError, match=r"no server answers at http://127.0.0.1:1 ") as caught:
            client.send(calls.fleet())
    assert "s3cret" not in str(caught.value) + caught.value.message


# -- streams ---------------------------------------------------------------------------------------


def streamed(*chunks: bytes) -> httpx.Response:
    async def body() -> Any:
        for chunk in chunks:
            yield chunk

    return httpx.Response(200, content=body(), headers={"x-slipstream-replica": "replica-1"})


STREAM = complete("tiny", [5], 3, stream=True)


async def test_a_streamed_answer_is_read_piece_by_piece() -> None:
    first = 'data: {"choices": [{"text": "a\u0085", "token_ids": [1, 2]}]}\n\n'.encode()
    last = (
        b'data: {"weight_version": 7, "choices": [{"text": "b", "token_ids": [3], '
        b'"weight_versions": [{"version": 7, "start": 0, "end": 3}]}]}\n\n'
    )
    usage = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    chunks = (first[:20], first[20:] + last[:9], last[9:] + usage)  # cut anywhere
    async with patient(streamed(*chunks)) as client:
        pieces = [piece async for piece in client.stream(STREAM)]
    assert [len(piece.answers) for piece in pieces] == [1, 1, 0]
    answer = join(pieces)
    assert (answer.text, answer.token_ids, answer.version) == ("a\u0085b", [1, 2, 3], 7)
    assert answer.replica == "replica-1" and answer.weight_versions[0].end == 3


async def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    lost = b'data: {"error": {"message": "the replica was lost"}}\n\n'
    async with patient(streamed(b'data: {"choices": []}\n\n', lost)) as client:
        pieces = client.stream(STREAM)
        assert await anext(pieces)
        with pytest.raises(FleetError, match="the replica was lost"):
            await anext(pieces)


async def test_a_stream_that_is_refused_or_lost_is_an_error() -> None:
    async with patient(httpx.Response(400, json={"error": {"message": "no such model"}})) as client:
        with pytest.raises(FleetError, match="400: no such model"):
            await anext(client.stream(STREAM))
    async with patient(httpx.ReadError("gone")) as client:
        with pytest.raises(FleetError, match=r"no server answers at http://fleet \(gone\)"):
            await anext(client.stream(STREAM))


async def test_many_calls_are_under_way_at_once_over_kept_connections() -> None:
    """Each server's answer waits for all requests of a turn: one that queued would never get its."""
    turn, connections = asyncio.Barrier(64), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await turn.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    body = json.dumps(HEALTH).encode()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with AsyncFleetClient.connect(url, at_once=64) as client, asyncio.timeout(30):
        for _ in range(3):
            await asyncio.gather(*(client.send(calls.health()) for _ in range(64)))
    server.close()
    assert connections == 64
