import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.client.completions import Answer, Completion, chat
from app.client.connection import AsyncFleetClient, FleetError
from app.jobs.policy import ATTEMPTS, Policy, Unanswered, require_complete, sample
from tests.app.fake_answers import chat_choice, client_of, refusal
from trainers.trajectory import VersionSpan

SPAN = VersionSpan(version=3, start=0, end=2)
ANSWER = Answer(
    text="8", token_ids=[5, 2], logprobs=[-0.5, 0.0], weight_versions=[SPAN], finish_reason="stop"
)
CALL = chat({"model": "m", "messages": []})
CHOICE = chat_choice([5], text="8", finish_reason="length")
TALK = [{"role": "user", "content": "x"}]
CUT_OFF = CHOICE | {"finish_reason": "abort"}
EMPTY: dict[str, Any] = {
    "message": {"content": ""},
    "token_ids": [],
    "logprobs": None,
    "finish_reason": "abort",
}


def completion(answer: Answer) -> Completion:
    return Completion(answers=[ANSWER, answer], prompt_token_ids=[1])


Reply = Sequence[dict[str, Any]] | httpx.Response


def fleet(*answers: Reply) -> tuple[AsyncFleetClient, list[httpx.Request]]:
    """A client of a fleet that gives these choices, or these answers, in turn."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        given = answers[len(asked) - 1]
        if isinstance(given, httpx.Response):
            return given
        return httpx.Response(200, json={"prompt_token_ids": [1], "choices": given})

    return client_of(answer), asked


async def test_everything_that_changes_the_distribution_is_given() -> None:
    client, asked = fleet([CHOICE])
    await Policy(client=client, model="m", max_tokens=9, stop=["\n"]).chat(TALK, ["a"])
    request = json.loads(asked[0].content)
    assert asked[0].url.path == "/v1/chat/completions"
    assert (request["max_tokens"], request["stop"]) == (9, ["\n"])
    assert request["temperature"] == request["top_p"] == request["repetition_penalty"] == 1.0
    assert request["top_k"] == -1 and request["min_p"] == 0.0
    assert request["return_token_ids"] is True and "x-rollout-id" not in asked[0].headers


async def test_a_request_names_its_rollout_and_keeps_its_name_when_it_is_sent_again() -> None:
    client, asked = fleet([CUT_OFF], [CHOICE], [CHOICE])
    policy = Policy(client=client, model="m", max_tokens=9, group="r.4")
    attempt = policy.attempt()
    for _ in range(2):
        await policy.chat(TALK, [attempt])
    first, again, other = (request.headers for request in asked)
    assert attempt.startswith("r.4.") and attempt != policy.attempt()
    assert {each["x-rollout-id"] for each in (first, again, other)} == {attempt}
    assert first["x-rollout-group"] == "r.4"
    assert first["x-rollout-turn"] == again["x-rollout-turn"] != other["x-rollout-turn"]


@pytest.mark.parametrize("name", ["token_ids", "weight_versions", "finish_reason"])
def test_what_is_missing_in_an_answer_is_named(name: str) -> None:
    empty: dict[str, Any] = {name: []}
    with pytest.raises(FleetError, match=f"has no {name}$"):
        require_complete(completion(replace(ANSWER, **empty)))
    with pytest.raises(FleetError, match="has no choices"):
        require_complete(Completion(answers=[]))


@pytest.mark.parametrize("cut_off", [CUT_OFF, EMPTY])
async def test_a_prompt_is_asked_again_when_one_of_its_answers_was_cut_off(cut_off: dict[str, Any]) -> None:
    client, asked = fleet([CHOICE, cut_off], [CHOICE, CHOICE])
    sampled = await sample(client, CALL)
    assert [answer.finish_reason for answer in sampled.answers] == ["length", "length"]
    assert asked[0].content == asked[1].content and len(asked) == 2


async def test_a_prompt_whose_answers_are_always_cut_off_is_given_up() -> None:
    client, asked = fleet(*[[CUT_OFF]] * ATTEMPTS)
    with pytest.raises(Unanswered, match="aborted its answers 3 times"):
        await sample(client, CALL)
    assert len(asked) == ATTEMPTS


async def test_a_deadly_prompt_is_given_up_at_once() -> None:
    client, asked = fleet(refusal(422, "deadly_request", "2 replicas were lost"))
    with pytest.raises(Unanswered, match=r"^2 replicas were lost$"):
        await sample(client, CALL)
    assert len(asked) == 1
    client, _ = fleet(refusal(400, "BadRequestError", "wrong"))
    with pytest.raises(FleetError, match="400"):
        await sample(client, CALL)


async def test_a_prompt_that_the_model_cannot_take_is_unanswered_and_another_wrong_request_is_an_error() -> (
    None
):
    for words in ("maximum context length is 8", "max_tokens must be at least 1, got 0."):  # none is left
        policy = Policy(client=fleet(refusal(400, "x", words))[0], model="m", max_tokens=9)
        with pytest.raises(Unanswered, match=words):
            await policy.chat(TALK, ["a"])
    policy = Policy(client=fleet(refusal(400, "x", "temperature"))[0], model="m", max_tokens=9)
    with pytest.raises(FleetError, match="temperature"):
        await policy.chat(TALK, ["a"])


@pytest.mark.parametrize(
    ("status", "words"), [(400, "Failed to load image"), (500, "Cannot connect to host a:80")]
)
async def test_a_prompt_with_an_image_that_no_engine_gets_is_unanswered(status: int, words: str) -> None:
    policy = Policy(client=fleet(refusal(status, "x", words))[0], model="m", max_tokens=9)
    image = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    with pytest.raises(Unanswered, match=words):
        await policy.chat([{"role": "user", "content": [image]}], ["a"])
    policy = Policy(client=fleet(refusal(status, "x", words))[0], model="m", max_tokens=9)
    with pytest.raises(FleetError, match=words):
        await policy.chat(TALK, ["a"])
