"""A real fleet, fuzzed from its own OpenAPI document: vLLM's routes as they pass, and ours."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.app.http.fuzzing import EXAMPLES, fuzz, judge
from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import PROMPT, complete
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(900)]

# Its answer does not end; or the requests after it would wait.
HELD = ("/fleet/events", "/pause", "/sleep", "/wake_up")
VOCABULARY = 32_000  # more than any tiny model has
GENERATE = "/inference/v1/generate"
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
PLACE = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 2}]}}
HALF = "\ud83d"  # of a surrogate pair
ENDLESS = {"type": "json_schema", "schema": {"$ref": "#"}}
OUT_OF_BOUNDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"max_tokens": 10**9},
        {"max_tokens": -1},
        {"logprobs": 10**6},
        {"prompt_logprobs": 10**6},
        {"n": 10**6},
        {"n": 20_000},
        {"n": 0},
        {"prompt": ["a"] * 20_000},
        {"prompt": ["a"] * 200, "n": 100},
        {"prompt": [1] * 5000},
        {"prompt": [10**9]},
        {"prompt": [-5]},
        {"prompt": []},
        {"temperature": -1},
        {"temperature": float("1e308") * 10},
        {"model": "../../etc/passwd"},
        {"model": "/etc"},
        {"model": "a" * 10_000},
        {"stop": ["a"] * 10_000, "n": "x"},
        {"logit_bias": {"999999999": 1}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"stop": [HALF]},
        {"stop": HALF, "n": 2},
        {"stop": [HALF], "stream": True},
        {"bad_words": [HALF]},
        {"vllm_xargs": {"a": HALF}},
        {"request_id": HALF},
        {"seed": 10**30},
    ],
    "/v1/chat/completions": [
        {"messages": [], "max_tokens": 10**9},
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1/0 }}"},
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": "user", "content": "a"}], "stop": [HALF]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "a"}], "stop_sequences": [HALF]},
        {"messages": [{"role": "user", "content": "a"}], "output_config": {"format": ENDLESS}},
    ],
    "/v1/responses": [{"input": "a", "text": {"format": {"name": "n", **ENDLESS}}}],
    "/tokenize": [{"prompt": 5}, {"prompt": HALF}],
    "/detokenize": [{"tokens": [10**30]}, {"tokens": [-1]}, {"tokens": "x"}],
    GENERATE: [
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [10**9]},
        {"token_ids": [2**70]},
        {"token_ids": [1] * 5000},
        {"token_ids": "text"},
        {"cache_salt": ""},
        {"cache_salt": "a" * 5000},
        {"priority": 2**80},
        {"model": "another"},
        {"features": PLACE},
        {"features": PLACE | {"kwargs_data": {"image": ["gAAA"]}}},
        {"content_parts": [IMAGE]},
        {"content_parts": [{"type": "image_url", "url": "file:///etc/passwd"}]},
        *(
            {"sampling_params": each}
            for each in (
                {"n": 20_000},
                {"n": 0},
                {"max_tokens": 0},
                {"max_tokens": 2**70},
                {"seed": 2**70},
                {"logprobs": 10**6},
                {"prompt_logprobs": 10**6},
                {"stop_token_ids": [VOCABULARY * 100], "min_tokens": 1},
                {"stop_token_ids": [-7], "min_tokens": 1},
                {"logit_bias": {str(10**9): 1}},
                {"allowed_token_ids": [10**9]},
                {"allowed_token_ids": []},
                {"logprob_token_ids": [10**9]},
                {"prompt_logprob_token_ids": [[10**9]]},
                {"trace_decode_token_ids": [10**9]},
                {"routed_experts_prompt_start": -1},
                {"structured_outputs": {"regex": "("}},
                {"structured_outputs": {"grammar": "root ::= root"}},
                {"stop": [HALF]},
                {"bad_words": [HALF]},
                {"temperature": "nan"},
            )
        ),
    ],
}
BEGUN: dict[str, dict[str, Any]] = {  # what the changes make wrong
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    GENERATE: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
}


@contextmanager
def no_engine_is_lost(client: httpx.Client) -> Iterator[None]:
    def incarnations() -> set[str]:
        return {member["incarnation"] for member in client.get("/fleet").json()["members"]}

    before = incarnations()
    yield
    assert incarnations() == before
    assert len(complete(client, PROMPT, 8).token_ids) == 8


def test_nothing_that_is_out_of_bounds_loses_an_engine(fleet: Fleet) -> None:
    with fleet.client(timeout_s=30) as client, no_engine_is_lost(client):
        for path, bodies in OUT_OF_BOUNDS.items():
            for changes in bodies:
                body = {"model": MODEL} | BEGUN.get(path, {"max_tokens": 2}) | changes
                content = json.dumps(body).encode()  # httpx's own refuses what is no number
                answer = client.post(path, content=content, headers={"content-type": "application/json"})
                judge(f"POST {path} {str(changes)[:80]}", answer.status_code, answer.content)
                assert answer.is_client_error or path != GENERATE, (changes, answer.text[:300])


@pytest.mark.long
def test_a_fuzzed_fleet_keeps_serving(fleet: Fleet) -> None:
    with fleet.client() as client, no_engine_is_lost(client):
        tally = fuzz(
            fleet.url,
            client.get("/openapi.json").json(),
            skip=lambda path: path in HELD,
            also_allowed=frozenset({501, 503}),  # vLLM: the model has no such task; a round has no replica
            examples=max(2, EXAMPLES // 4),
        )
        print(f"{tally.requests} requests, {dict(tally.statuses)}, the slowest took {tally.slowest_s:.2f} s")
        # A round that was begun ends with its lease.
        until(lambda: client.get("/fleet").json()["round"] is None, 60, "the end of the last round")
