"""A list of prompts over two real engines is answered as by one of them."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.fleet.session_fleet import MODEL, Fleet
from tests.fleet.talk import succeeded, train_and_publish

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

PROMPTS = [[5 + row, 6, 7 + 2 * row, 8] for row in range(12)]
GREEDY = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
DETAILS = {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
SESSION = {"x-session-id": "all of it to one replica"}


def answers(client: httpx.Client, asked: Mapping[str, Any], path: str = "/v1/completions") -> tuple[Any, Any]:
    """The answer of one replica, and of both, to the same request."""
    alone = succeeded(client.post(path, json=asked, headers=SESSION))
    time.sleep(0.1)  # its replica is idle again
    together = succeeded(client.post(path, json=asked))
    assert len(alone.headers["x-slipstream-replica"].split(", ")) == 1
    assert len(together.headers["x-slipstream-replica"].split(", ")) == 2, "it was not divided"
    return _rounded(alone.json()), _rounded(together.json())


def _rounded(value: Any) -> Any:
    """Without what is an answer's own, and with numbers that do not depend on the batch."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items() if name not in ("id", "created")}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "options",
    [
        DETAILS,
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 2},
    ],
    ids=["details", "seed", "echo", "beams"],
)
def test_a_list_of_token_ids(fleet: Fleet, options: Mapping[str, Any]) -> None:
    with fleet.client() as client:
        alone, together = answers(client, {**GREEDY, **options})
    assert together == alone
    assert [choice["index"] for choice in together["choices"]] == list(range(12 * options.get("n", 1)))
    assert together["usage"]["prompt_tokens"] == 48
    has_spans = ["weight_versions" in choice for choice in together["choices"]]
    assert has_spans == [not options.get("use_beam_search")] * len(has_spans)


def test_a_list_of_texts(fleet: Fleet) -> None:
    with fleet.client() as client:
        texts = [f"text {number}" for number in range(12)]
        alone, together = answers(client, {**GREEDY, **DETAILS, "prompt": texts})
    assert together == alone and len(together["choices"]) == 12


def test_a_batch_of_chats(fleet: Fleet) -> None:
    chats = [[{"role": "user", "content": f"say {number}"}] for number in range(10)]
    asked = {"model": MODEL, "messages": chats, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with fleet.client() as client:
        alone, together = answers(client, asked, path="/v1/chat/completions/batch")
    assert together == alone and len(together["choices"]) == 10


def test_a_stream(fleet: Fleet) -> None:
    asked = {
        **GREEDY,
        "n": 2,
        "temperature": 1.0,
        "seed": 7,
        "stream": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    asked |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with fleet.client() as client:
        alone = _streamed(succeeded(client.post("/v1/completions", json=asked, headers=SESSION)))
        time.sleep(0.1)
        answer = succeeded(client.post("/v1/completions", json=asked))
        assert len(answer.headers["x-slipstream-replica"].split(", ")) == 2
        together = _streamed(answer)
    assert together == alone


def _streamed(answer: httpx.Response) -> Any:
    """What a stream said of each choice, and its usage; ids and times are one."""
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(each["id"], each["created"]) for each in parsed}) == 1
    *pieces, usage = parsed
    assert usage["choices"] == [] and all(each["choices"] for each in pieces)
    said: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            about = said.setdefault(
                choice["index"], {"text": "", "token_ids": [], "logprobs": [], "prompt": None}
            )
            about["text"] += choice["text"]
            about["token_ids"] += choice["token_ids"] or []
            about["logprobs"] += choice["logprobs"]["token_logprobs"]
            about["prompt"] = choice.get("prompt_token_ids") or about["prompt"]
            about["end"] = choice["finish_reason"], choice.get("weight_versions")
            about["usage"] = piece["usage"]
    return _rounded([dict(sorted(said.items())), usage["usage"], usage["weight_version"]])


def test_what_vllm_refuses_in_a_part_is_refused(fleet: Fleet) -> None:
    with fleet.client() as client:
        asked = {**GREEDY, "prompt": [*PROMPTS, [5] * 2000]}  # longer than the model takes
        alone = client.post("/v1/completions", json=asked, headers=SESSION)
        together = client.post("/v1/completions", json=asked)
    assert alone.status_code == together.status_code == 400
    assert together.json()["error"] == alone.json()["error"]


async def test_parts_have_the_version_that_the_request_demands(fleet: Fleet) -> None:
    with fleet.client() as client:
        version = train_and_publish(client)
        answer = succeeded(
            client.post("/v1/completions", json=GREEDY, headers={"x-min-weight-version": str(version)})
        )
    assert len(answer.headers["x-slipstream-replica"].split(", ")) == 2
    assert answer.json()["weight_version"] == version
    spans = [choice["weight_versions"] for choice in answer.json()["choices"]]
    assert spans == [[{"version": version, "start": 0, "end": 8}]] * 12


async def test_a_client_that_leaves_ends_all_parts(fleet: Fleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
        for stream in (False, True):
            asked = {**GREEDY, "max_tokens": 1000, "stream": stream}
            try:
                async with client.stream("POST", "/v1/completions", json=asked, timeout=2) as answer:
                    await anext(answer.aiter_raw())
            except httpx.ReadTimeout:
                assert not stream
            await asyncio.sleep(1.0)  # the rest of it would take several
        assert (await client.post("/abort_requests", json={})).json()["aborted"] == 0
