"""Against vLLM's own models of the answer: ours adds to them, and they read what it added to."""

import json
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProb,
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateTokensChoice,
    GenerateTokensResponse,
)

from deployments.replica.server.token_names import name_tokens
from deployments.replica.spans import SpanRecorder, annotate_json


def entry(token_id: int, logprob: float) -> GenerateLogProbsContent:
    alternatives = [GenerateLogProb(token_id=each, logprob=logprob) for each in (token_id, token_id + 1)]
    return GenerateLogProbsContent(token_id=token_id, logprob=logprob, top_logprobs=alternatives)


def generated(**fields: Any) -> GenerateTokensResponse:
    logprobs = GenerateLogProbs(content=[entry(17, -0.5), entry(3, -1.5)])
    choice = GenerateTokensChoice(index=0, token_ids=[17, 3], logprobs=logprobs)
    return GenerateTokensResponse(choices=[choice], **fields)


def test_each_log_probability_has_its_token_in_both_forms() -> None:
    body = annotate_json(json.dumps(generated().model_dump()).encode(), SpanRecorder(4), 200)
    (choice,) = json.loads(body)["choices"]
    named = [(entry["token_id"], entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert named == [(17, "token_id:17", -0.5), (3, "token_id:3", -1.5)]
    alternatives = [each["token"] for each in choice["logprobs"]["content"][0]["top_logprobs"]]
    assert alternatives == ["token_id:17", "token_id:18"]


def test_vllms_own_model_reads_the_answer() -> None:
    answer = generated(request_id="a", model="tiny", created=1)
    body = annotate_json(json.dumps(answer.model_dump()).encode(), SpanRecorder(4), 200)
    assert GenerateTokensResponse.model_validate_json(body).choices == answer.choices


def test_other_shapes_stay_as_they_are() -> None:
    for logprobs in (
        None,
        {"content": None},
        {"content": [{"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": []}]},
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": None, "text_offset": [0]},
    ):
        before = json.dumps(logprobs)
        name_tokens(logprobs)
        assert json.dumps(logprobs) == before
