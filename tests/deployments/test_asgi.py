import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.asgi import AsgiCall, HttpRequest

LEFT: list[str] = []


async def echo(request: Request) -> Response:
    return JSONResponse({"body": (await request.body()).decode(), "q": request.query_params["q"]})


async def count(request: Request) -> Response:
    async def numbers() -> Any:
        try:
            for number in range(1000):
                yield f"data: {number}\n\n"
                await asyncio.sleep(0.01)
        finally:
            LEFT.append("stream")

    return StreamingResponse(numbers(), media_type="text/event-stream")


async def fail(request: Request) -> Response:
    raise KeyError("broken")


APP = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/count", count), Route("/fail", fail)])


def request(path: str, body: bytes = b"") -> HttpRequest:
    return HttpRequest(method="POST" if body else "GET", path=path, query=b"q=1", headers=[], body=body)


async def test_an_answer_that_is_no_stream_comes_in_one_piece() -> None:
    call = AsgiCall(APP, request("/echo", b"hello"))
    answer = await call.start()
    await call.close()
    assert (answer.status, answer.body, answer.streaming) == (200, b'{"body":"hello","q":"1"}', False)


async def test_pieces_that_piled_up_travel_as_one() -> None:
    call = AsgiCall(APP, request("/count"))
    answer = await call.start()
    assert answer.streaming and answer.body == b""
    await asyncio.sleep(0.1)
    first = await anext(call.pieces())
    assert first.startswith(b"data: 0\n\n") and first.count(b"data:") > 3
    await call.close()


async def test_closing_ends_the_request_in_the_application() -> None:
    LEFT.clear()
    call = AsgiCall(APP, request("/count"))
    await call.start()
    await call.close()
    assert LEFT == ["stream"]


async def test_an_application_that_fails_says_so() -> None:
    call = AsgiCall(APP, request("/fail"))
    answer = None
    with pytest.raises(KeyError):  # Starlette answers 500, and then raises what happened
        answer = await call.start()
        assert answer.status == 500
        await call._task
    await call.close()
