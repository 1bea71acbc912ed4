from typing import Any

import httpx
import pytest

from app.jobs.rollouts import FleetError, Sampling, call, parse_answers
from trainers.trajectory import VersionSpan

CHOICE: dict[str, Any] = {
    "message": {"content": "8"},
    "token_ids": [5, 2],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0}]},
    "weight_versions": [{"version": 3, "start": 0, "end": 2}],
}


def client(*answers: httpx.Response | Exception) -> httpx.AsyncClient:
    waiting = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://fleet")


def test_everything_that_changes_the_distribution_is_given() -> None:
    request = Sampling(answers=4, max_tokens=9, stop=["\n"]).request("m", [{"role": "user", "content": "x"}])
    assert (
        request["n"] == 4
        and request["temperature"] == request["top_p"] == request["repetition_penalty"] == 1.0
    )
    assert request["top_k"] == -1 and request["min_p"] == 0.0
    assert request["logprobs"] is True and request["return_token_ids"] is True


def test_an_answer_is_read_with_its_spans() -> None:
    prompt, (answer,) = parse_answers({"prompt_token_ids": [1], "choices": [CHOICE]})
    assert prompt == (1,)
    assert answer.token_ids == (5, 2) and answer.logprobs == (-0.5, 0.0) and answer.text == "8"
    assert answer.weight_versions == (VersionSpan(version=3, start=0, end=2),)


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "weight_versions"])
def test_what_is_missing_in_an_answer_is_named(name: str) -> None:
    with pytest.raises(FleetError, match=f"has no {name}"):
        parse_answers({"prompt_token_ids": [1], "choices": [CHOICE | {name: None}]})


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(FleetError, match="3 token ids but 2 log-probabilities"):
        parse_answers({"prompt_token_ids": [1], "choices": [CHOICE | {"token_ids": [1, 2, 3]}]})
    with pytest.raises(FleetError, match="no prompt_token_ids"):
        parse_answers({"choices": [CHOICE]})


async def test_a_fleet_that_is_short_of_replicas_is_asked_again() -> None:
    busy = httpx.Response(503, headers={"retry-after": "0"})
    async with client(busy, busy, httpx.Response(200, json={"a": 1})) as fleet:
        assert await call(fleet, "POST", "/v1/chat/completions", {}) == {"a": 1}


async def test_a_refusal_is_told_at_once() -> None:
    async with client(httpx.Response(400, text="no such model")) as fleet:
        with pytest.raises(FleetError, match=r"POST /x: 400 no such model"):
            await call(fleet, "POST", "/x", {})


async def test_a_step_whose_answer_was_lost_is_not_done_twice() -> None:
    async with client(httpx.ReadError("gone"), httpx.Response(200, json={})) as fleet:
        with pytest.raises(FleetError, match="ReadError"):
            await call(fleet, "POST", "/train/step", {})
