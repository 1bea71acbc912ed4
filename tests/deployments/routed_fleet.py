"""The router in front of replica fronts on their own servers; only Serve's choice of a replica is a fake."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.calls.http_server import HttpServer
from deployments.protocol.errors import Conflict, ReplicaUnavailable, SlipstreamError
from deployments.protocol.routing import Demand
from deployments.replica.capture import Capture, Ledger
from deployments.replica.continuation import begin_of
from deployments.replica.http_front import ReplicaFront
from deployments.replica.spans import RECORDER, SpanRecorder
from deployments.router.forwarding import RouterLimits
from deployments.router.replica_policy import Candidate, eligible_loads, order_candidates
from deployments.router.router import Router
from tests.deployments.engine_outputs import generated, sampling_params


class FakeCompletions:
    """vLLM's completions and batch chat, as far as the answer to a list of prompts has a shape: a prompt's
    own text in upper case, one token for each letter. `tests/fleet/test_launched.py` compares the real ones.

    Prompts with a meaning: "wrong" is refused with 400, "slow" waits for `lives`.

    Args:
        fail: the engine is dead from now on.
    """

    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail
        self.lives = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.dies = False  # with the next request; in a stream, after the first token
        self.cancelled = 0

    async def completions(self, request: Request) -> Response:
        asked = await request.json()
        self.bodies.append(asked)
        prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
        if not isinstance(prompts[0], list | str):
            prompts = [prompts]
        texts = [each if isinstance(each, str) else "".join(map(chr, each)) for each in prompts]
        if "wrong" in texts:
            return JSONResponse(
                {
                    "error": {
                        "message": "a wrong prompt",
                        "type": "BadRequestError",
                        "param": None,
                        "code": 400,
                    }
                },
                400,
            )
        base = request.headers.get("x-request-id", asked.get("request_id"))
        head = {"id": f"cmpl-{base}", "object": "text_completion", "created": int(time.time()), "model": "m"}
        recorder = RECORDER.get()
        assert recorder is not None
        if asked.get("stream"):
            events = self._events(texts, asked, head, recorder)
            return StreamingResponse(events, media_type="text/event-stream")
        await self._wait(request, texts)
        return JSONResponse(self._whole(texts, asked, head, recorder))

    async def _wait(self, request: Request, texts: list[str]) -> None:
        """As vLLM does it: until the client leaves."""
        if self.dies:
            self._fail()
            raise RuntimeError("the engine is dead")
        while "slow" in texts and not self.lives.is_set():
            if await request.is_disconnected():
                self.cancelled += 1
                raise RuntimeError("the client has left")
            await asyncio.sleep(0.01)

    def _whole(
        self, texts: list[str], asked: dict[str, Any], head: dict[str, Any], recorder: SpanRecorder
    ) -> dict[str, Any]:
        answers = asked.get("n") or 1
        choices: list[dict[str, Any]] = []
        for text in texts:
            first = recorder.open_call(answers)
            for sample in range(answers):
                recorder.record(first + sample, self._spans(text))
                logprobs = {"tokens": list(text.upper()), "token_logprobs": [-0.5] * len(text)}
                choices.append(
                    {
                        "index": len(choices),
                        "text": text.upper(),
                        "finish_reason": "stop",
                        "logprobs": logprobs if asked.get("logprobs") is not None else None,
                        "prompt_logprobs": [None] if asked.get("prompt_logprobs") is not None else None,
                        "prompt_token_ids": list(map(ord, text)) if asked.get("return_token_ids") else None,
                    }
                )
        return {**head, "choices": choices, "usage": _usage(texts, answers), "metrics": {"of": len(texts)}}

    async def _events(
        self, texts: list[str], asked: dict[str, Any], head: dict[str, Any], recorder: SpanRecorder
    ) -> AsyncIterator[str]:
        answers = asked.get("n") or 1
        first = [recorder.open_call(answers) for _ in texts]
        try:
            if "slow" in texts:
                await self.lives.wait()
            for step in range(max(map(len, texts))):
                for number, text in enumerate(texts):
                    for sample in range(answers if step < len(text) else 0):
                        last = step == len(text) - 1
                        if last:
                            recorder.record(first[number] + sample, self._spans(text))
                        choice = {
                            "index": number * answers + sample,
                            "text": text[step].upper(),
                            "finish_reason": "stop" if last else None,
                        }
                        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
                await asyncio.sleep(0)
                if self.dies:
                    self._fail()
                    raise RuntimeError("the engine is dead")
            if (asked.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(texts, answers)})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    def _spans(self, text: str) -> list[dict[str, int]]:
        return [{"version": 7, "start": 0, "end": len(text)}]


def _usage(texts: list[str], answers: int) -> dict[str, Any]:
    prompt, completion = sum(map(len, texts)), answers * sum(map(len, texts))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None,
    }


SPANS = [{"version": 7, "start": 0, "end": 3}]
# vLLM's when its engine is dead; the second one is that of /v1/messages.
ERROR = 'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n'
NAMED_ERROR = (
    'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"EngineDeadError"}}\n\n'
)


class Engine:
    """What stands behind a front: an application with the kinds of answers that vLLM gives."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.left = 0  # streams that were not read to their end
        self.asked: list[str] = []  # paths of the requests that passed the front
        self.lives = asyncio.Event()  # answers of /late and /long wait for it
        self.completions = FakeCompletions(self.fail)
        self.adapter: str | None = None
        self.ids: list[str | None] = []  # that events of /v1/chat/completions would have
        self.continued: list[list[int]] = []  # what captured streams had said before
        self.in_flight: Callable[[], int] = lambda: 0
        self.app = Starlette(
            routes=[
                Route("/whole", self.whole, methods=["POST"]),
                Route("/stream", self.stream),
                Route("/die", self.die, methods=["GET", "POST"]),
                Route("/die-in-stream", self.die_in_stream, methods=["POST"]),
                Route("/die-late", self.die_late, methods=["POST"]),
                Route("/late", self.late, methods=["POST"]),
                Route("/long", self.long, methods=["POST"]),
                Route("/text", self.text),
                Route("/metrics", self.metrics),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions.completions, methods=["POST"]),
            ]
        )

    def fail(self) -> None:
        self.refusal = "the engine is dead"

    async def whole(self, request: Request) -> Response:
        self._spans()
        body = (await request.body()).decode()
        seen = {"body": body, "query": request.url.query, "path": request.scope["path"]}
        seen |= {name: text for name, text in request.headers.items() if "secret" in text}
        return JSONResponse({"choices": [{"index": 0, "finish_reason": "length"}], "seen": seen})

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            finished = False
            try:
                for number in range(int(request.query_params["events"])):
                    yield f'data: {{"n": {number}, "choices": []}}\n\n'
                    await asyncio.sleep(0.01)
                self._spans()
                yield 'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'
                finished = True
                if "break" in request.query_params:
                    raise RuntimeError("broken in the middle")
            finally:
                self.left += not finished

        return StreamingResponse(events(), media_type="text/event-stream")

    async def die(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        self.refusal = "the engine is dead"
        return JSONResponse({"error": {"message": "EngineDeadError"}}, status_code=500)

    async def die_in_stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            self.asked.append(request.url.path)
            self.refusal = "the engine is dead"
            yield NAMED_ERROR if "named" in request.query_params else ERROR
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def die_late(self, request: Request) -> Response:
        async def events() -> AsyncIterator[str]:
            self.asked.append(request.url.path)
            yield 'data: {"n": 0, "choices": []}\n\n'
            self.refusal = "the engine is dead"
            yield ERROR
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def late(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        await self.lives.wait()
        return PlainTextResponse("late")

    async def long(self, request: Request) -> Response:
        named = "named" in request.query_params

        async def events() -> AsyncIterator[str]:
            yield ("event: message_start\n" if named else "") + 'data: {"n": 0, "choices": []}\n\n'
            await self.lives.wait()
            if self.refusal is not None and "raises" in request.query_params:
                raise RuntimeError("EngineDeadError")  # as on /v1/responses
            if self.refusal is not None:
                yield NAMED_ERROR if named else ERROR
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        """As vLLM above `RecordingLLM`: the tokens of `answer`, for the token ids of `prompt`. `dies_at`: the
        numbers of tokens after which its engine dies, one replica after the other."""
        recorder = RECORDER.get()
        assert recorder is not None
        asked = await request.json()
        self.ids.append(request.headers.get("x-request-id", asked.get("request_id")))
        streams = asked.get("stream", False)
        outputs = generated(asked["prompt"], [asked["answer"]] * asked.get("n", 1), delta=streams)
        if recorder.capture is not None:
            sampling = sampling_params(
                delta=streams, logprobs=asked.get("logprobs"), choices=asked.get("n", 1)
            )
            prompt, choice, adapter = {"type": "token"}, recorder.open_call(1), self.adapter
            outputs = recorder.capture.taken(outputs, prompt, sampling, choice, lambda: adapter)
            outputs = self._answered(outputs, recorder.capture, asked)
        if streams:
            return StreamingResponse(_events(outputs, asked.get("opens", 0)), media_type="text/event-stream")
        choices = [each async for output in outputs for each in _choices(output)]
        if asked.get("dies"):
            self.fail()
            raise RuntimeError("lost after it has recorded its answer")
        return JSONResponse({"choices": choices})

    async def _answered(
        self, outputs: AsyncIterator[Any], capture: Capture, asked: dict[str, Any]
    ) -> AsyncIterator[Any]:
        repeated: list[int] = []
        if (said := capture.said) is not None:
            if asked.get("n", 1) > 1:
                said.give_up()
            repeated = [token for piece in said.pieces() for token in piece.token_ids]
            self.continued.append(repeated)
            try:
                said.check(begin_of(asked["prompt"], self.adapter, 0))
            except SlipstreamError as error:
                capture.failure = error
                raise
        number = 0
        async for output in outputs:
            number += 1
            yield output
            if number in asked.get("dies_at", ()) and number > len(repeated):
                self.fail()
                raise RuntimeError("EngineDeadError")

    async def text(self, request: Request) -> Response:
        return PlainTextResponse("plain", headers={"x-own": "kept"})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(f"running {self.in_flight()}\n")

    def _spans(self) -> None:
        recorder = RECORDER.get()
        assert recorder is not None
        recorder.record(0, SPANS)


def _choices(output: Any) -> list[dict[str, Any]]:
    return [
        {"index": each.index, "text": str(list(each.token_ids)), "logprobs": each.logprobs is not None}
        for each in output.outputs
    ]


async def _events(outputs: AsyncIterator[Any], opens: int) -> AsyncIterator[str]:
    """`opens`: events before the first output, as on /v1/responses."""
    for _ in range(opens):
        yield 'data: {"choices": []}\n\n'
    try:
        async for output in outputs:
            yield f"data: {json.dumps({'choices': _choices(output)})}\n\n"
    except Exception as error:  # as vLLM does
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
    yield "data: [DONE]\n\n"


class Fleet:
    """Stands for Serve's handle: real fronts, chosen by the real policy."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.fronts: dict[str, ReplicaFront] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        self.loads: dict[str, int] = {}  # as the replicas have reported them
        self.demands: list[Demand] = []
        self.rollouts: Ledger | None = None

    async def add(self, name: str) -> HttpServer:
        engine = self.engines[name] = Engine()

        async def admit(demand: Demand) -> None:
            if engine.refusal is not None:
                raise ReplicaUnavailable(engine.refusal)
            if demand.min_version > 7:
                raise Conflict("x-min-weight-version asks for more", {"waited_s": demand.timeout_s})

        front = ReplicaFront(
            engine.app,
            replica_id=name,
            admit=admit,
            refusal=lambda: engine.refusal,
            version=lambda: 6,
            rollouts=self.rollouts,
            require_passed=lambda method, path: None,  # its routes are not vLLM's
        )
        self.fronts[name] = front
        engine.in_flight = lambda: front.in_flight
        server = HttpServer(front, "127.0.0.1")
        self.metadata[name] = {"address": server.address, "key": front.key}
        return server

    @asynccontextmanager
    async def choose_replica(self, demand: Demand, *, _reserve: bool) -> AsyncIterator[Any]:
        self.demands.append(demand)
        known = [
            Candidate(replica_id=name, version=6, admitted=True, in_flight=self.loads.get(name, 0))
            for name in self.metadata
        ]
        if demand.census is not None:
            demand.census.loads = eligible_loads(known, demand)
            demand.census.metadata = dict(self.metadata)
        ranks = order_candidates(known, demand)
        if demand.choice is not None:
            demand.choice.version = 6
        if not ranks:
            await asyncio.sleep(3600)
        yield SimpleNamespace(replica_id=ranks[0][0], replica_metadata=self.metadata[ranks[0][0]])


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SlipstreamError)
    headers = {"retry-after": f"{error.detail.get('retry_after_s', 1):g}"} if error.status == 503 else {}
    return JSONResponse(error.body(), error.status, headers=headers)


@asynccontextmanager
async def service(*names: str, **limits: Any) -> AsyncIterator[tuple[Fleet, Router, httpx.AsyncClient]]:
    defaults = {"max_ongoing_requests": 8, "max_body_bytes": 100, "request_timeout_s": 1.0}
    fleet = Fleet()
    router = Router(fleet, RouterLimits(**(defaults | limits)))
    app = Starlette(
        routes=[Route("/{path:path}", router)], exception_handlers={SlipstreamError: answer_error}
    )
    servers = [await fleet.add(name) for name in names]
    front = HttpServer(app, "127.0.0.1")
    try:
        async with httpx.AsyncClient(base_url=f"http://{front.address}", timeout=10, verify=False) as client:
            yield fleet, router, client
    finally:
        await router.close()
        # At once: each looks only ten times a second whether it is to stop.
        await asyncio.gather(*(server.close() for server in (front, *servers)))
