"""Captured rollouts of real engines, beside what the engines told the client itself."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import PROMPT, succeeded

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]

SAMPLED = {"model": MODEL, "temperature": 0.7, "ignore_eos": True}
TALK = [{"role": "user", "content": "say something"}]
ROUTES = {
    "/v1/completions": {**SAMPLED, "prompt": PROMPT, "max_tokens": 6},
    "/v1/chat/completions": {**SAMPLED, "messages": TALK, "max_tokens": 6},
    "/v1/responses": {**SAMPLED, "input": "say something", "max_output_tokens": 6},
    "/v1/messages": {"model": MODEL, "messages": TALK, "max_tokens": 6},
    "/inference/v1/generate": {
        "model": MODEL,
        "token_ids": PROMPT,
        "sampling_params": {"temperature": 0.7, "max_tokens": 6, "ignore_eos": True},
    },
}


def captured(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[httpx.Response, dict[str, Any]]:
    """The answer, and the sequence that a trainer gets of it."""
    rollout = uuid.uuid4().hex
    answer = succeeded(client.post(path, json=body, headers={"x-rollout-id": rollout}))
    succeeded(client.post(f"/rollouts/{rollout}/reward", json={"reward": 1.0}))
    for attempt in range(20):  # other tests leave groups, which come first
        taken = succeeded(client.post("/rollouts/take", json={"step": f"{rollout}/{attempt}"})).json()
        found = [each for group in taken["groups"] for each in group["rollouts"]]
        if [each["id"] for each in found] == [rollout]:
            break
    (own,) = found
    assert own["id"] == rollout
    (sequence,) = own["sequences"]
    return answer, sequence


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_captured_is_what_the_engine_returned(fleet: Fleet, path: str) -> None:
    wanted = {"return_token_ids": True, "logprobs": True if "chat" in path else 0}
    with fleet.client() as client:
        answer, sequence = captured(client, path, ROUTES[path] | wanted)
    (choice,) = answer.json()["choices"]
    prompt = choice.get("prompt_token_ids") or answer.json()["prompt_token_ids"]
    assert (sequence["prompt_token_ids"], sequence["token_ids"]) == (prompt, choice["token_ids"])
    logprobs = choice["logprobs"]
    told = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs["content"]]
    assert sequence["logprobs"] == pytest.approx(told, abs=1e-5)
    assert sequence["weight_versions"] == choice["weight_versions"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_is_captured_and_its_answer_shows_nothing_of_it(
    fleet: Fleet, path: str, stream: bool
) -> None:
    body = ROUTES[path] | ({"stream": True} if stream else {})
    if "generate" not in path:
        body["temperature"] = 0.0  # sampled, one of them may have no text, and then no "output"
    with fleet.client() as client:
        plain = succeeded(client.post(path, json=body))
        answer, sequence = captured(client, path, body)
    assert 0 < len(sequence["token_ids"]) <= 6 and all(sequence["loss_mask"])
    assert all(value <= 0 for value in sequence["logprobs"]) and len(sequence["logprobs"]) > 0
    assert _shape(answer) == _shape(plain)
    if "token_ids" in body:
        assert sequence["prompt_token_ids"] == PROMPT
    if path == "/inference/v1/generate" and not stream:
        assert sequence["token_ids"] == answer.json()["choices"][0]["token_ids"]


def _shape(answer: httpx.Response) -> set[tuple[str, ...]]:
    """The paths of names in an answer, or in a stream's events, which may have one token or several."""
    if answer.headers["content-type"].startswith("application/json"):
        return set(_paths(answer.json()))
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return {path for each in events for path in _paths(json.loads(each))}


def _paths(value: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield (name,)
            yield from ((name, *path) for path in _paths(each))
    elif isinstance(value, list):
        for each in value:
            yield from _paths(each)
