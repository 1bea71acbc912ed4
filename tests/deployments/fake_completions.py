"""vLLM's completions and batch chat routes, as far as the answer to a list of prompts has a shape.

What the real ones answer is compared in `tests/fleet/test_launched.py`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.replica.spans import RECORDER, SpanRecorder


class FakeCompletions:
    """Answers a prompt by its own text in upper case, one token for each letter.

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
