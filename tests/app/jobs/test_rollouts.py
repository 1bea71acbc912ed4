from dataclasses import replace

import pytest

from app.client.completions import Answer, Completion
from app.client.connection import FleetError
from app.jobs.rollouts import Sampling, require_complete
from trainers.trajectory import VersionSpan

SPAN = VersionSpan(version=3, start=0, end=2)
ANSWER = Answer(text="8", token_ids=[5, 2], logprobs=[-0.5, 0.0], weight_versions=[SPAN])


def completion(answer: Answer) -> Completion:
    return Completion(answers=[ANSWER, answer], prompt_token_ids=[1])


def test_everything_that_changes_the_distribution_is_given() -> None:
    call = Sampling(answers=4, max_tokens=9, stop=["\n"]).call("m", [{"role": "user", "content": "x"}])
    request = call.body
    assert request is not None and call.path == "/v1/chat/completions"
    assert (request["n"], request["max_tokens"], request["stop"]) == (4, 9, ["\n"])
    assert request["temperature"] == request["top_p"] == request["repetition_penalty"] == 1.0
    assert request["top_k"] == -1 and request["min_p"] == 0.0
    assert request["logprobs"] is True and request["return_token_ids"] is True


def test_answers_that_have_everything_are_passed_on() -> None:
    assert require_complete(completion(ANSWER)) == [ANSWER, ANSWER]


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "weight_versions"])
def test_what_is_missing_in_an_answer_is_named(name: str) -> None:
    with pytest.raises(FleetError, match=f"has no {name}$"):
        require_complete(completion(replace(ANSWER, **{name: []})))


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(FleetError, match="3 token ids but 2 log-probabilities"):
        require_complete(completion(replace(ANSWER, token_ids=[1, 2, 3])))


def test_a_completion_without_its_prompt_is_refused() -> None:
    with pytest.raises(FleetError, match="no prompt_token_ids"):
        require_complete(Completion(answers=[ANSWER]))
