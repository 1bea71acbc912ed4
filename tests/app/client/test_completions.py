import json
from typing import Any

import pytest

from app.client.completions import Answer, Completion, join, read_completion
from trainers.trajectory import Trajectory, VersionSpan

SPANS = [{"version": 3, "start": 0, "end": 2}]
COMPLETION: dict[str, Any] = {
    "text": "8",
    "token_ids": [5, 2],
    "logprobs": {"token_logprobs": [-0.5, 0]},
    "weight_versions": SPANS,
    "finish_reason": "length",
}
CHAT: dict[str, Any] = {
    "message": {"content": "8"},
    "token_ids": [5, 2],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0}]},
    "weight_versions": SPANS,
    "finish_reason": "length",
}


def read(body: dict[str, Any], **headers: str) -> Completion:
    return read_completion(json.dumps(body).encode(), headers)


@pytest.mark.parametrize("choice", [COMPLETION, CHAT])
def test_an_answer_is_read_with_its_spans(choice: dict[str, Any]) -> None:
    body = {"weight_version": 3, "prompt_token_ids": [1], "choices": [choice]}
    completion = read(body, **{"x-slipstream-replica": "replica-1"})
    assert completion.prompt_token_ids == [1]
    assert completion.answer == Answer(
        text="8",
        token_ids=[5, 2],
        logprobs=[-0.5, 0.0],
        weight_versions=[VersionSpan(version=3, start=0, end=2)],
        version=3,
        replica="replica-1",
        finish_reason="length",
    )
    assert not completion.answer.aborted
    assert read({"choices": [choice | {"finish_reason": "abort"}]}).answer.aborted


def test_the_version_of_an_answer_is_that_of_what_is_trained() -> None:
    spans = [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}]
    of_the_model = read({"choices": [COMPLETION | {"weight_versions": spans}]}).answer
    of_an_adapter = read({"choices": [COMPLETION | {"adapter": "math@12"}]}).answer
    assert (of_the_model.adapter, of_the_model.oldest_version) == (None, 3)
    assert (of_an_adapter.adapter, of_an_adapter.oldest_version) == ("math@12", 12)
    (span,) = of_an_adapter.trajectory((1,), 0.0).weight_versions
    assert (span.version, span.start, span.end) == (12, 0, len(of_an_adapter.token_ids))


def test_versions_are_numbers_also_where_vllm_writes_them_as_text() -> None:
    spans = [{"version": "9", "start": 0, "end": 1}, {"version": "10", "start": 1, "end": 2}]
    answer = read({"choices": [COMPLETION | {"weight_versions": spans}]}).answer  # of /inference/v1/generate
    assert (answer.oldest_version, answer.newest_version) == (9, 10)


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "", "token_ids": None, "logprobs": None},
        {"delta": {"role": "assistant"}},
        {"message": {"content": None}, "weight_versions": None},
    ],
)
def test_fields_that_were_not_requested_are_empty(choice: dict[str, Any]) -> None:
    answer = read({"choices": [choice]}).answer
    assert answer == Answer(text="", token_ids=[], logprobs=[], weight_versions=[])


def test_several_answers_are_no_single_answer() -> None:
    with pytest.raises(ValueError, match="too many values"):
        _ = read({"choices": [CHAT, CHAT]}).answer
    with pytest.raises(ValueError, match="got none"):
        join([read({"choices": []})])


def test_an_answer_with_its_advantage_is_a_trajectory() -> None:
    answer = read({"choices": [COMPLETION]}).answer
    assert answer.trajectory([1], 0.5) == Trajectory(
        prompt_token_ids=(1,),
        token_ids=(5, 2),
        logprobs=(-0.5, 0.0),
        advantage=0.5,
        weight_versions=(VersionSpan(version=3, start=0, end=2),),
    )
