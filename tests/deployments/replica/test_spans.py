"""Against vLLM's own models of the answer: ours adds to them, and they read what it added to."""

import json
from functools import partial
from typing import Any

import pytest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProb,
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.utils import random_uuid

from deployments.protocol.routing import Part
from deployments.replica.replica_engine import _BEAM
from deployments.replica.spans import SpanRecorder, annotate_events, annotate_json, name_tokens

SPANS = [{"version": 3, "start": 0, "end": 5}, {"version": 4, "start": 5, "end": 9}]


def recorder() -> SpanRecorder:
    made = SpanRecorder(3)
    first = made.open_call(2)
    made.record(first, SPANS)
    made.record(first + 1, [])
    return made


def test_choices_of_several_engine_calls_have_consecutive_indices() -> None:
    made = SpanRecorder(0)
    assert [made.open_call(2), made.open_call(1), made.open_call(2)] == [0, 2, 3]


def test_response_has_versions_per_choice() -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "stop"}]}
    )
    answer = json.loads(annotate_json(body.encode(), recorder(), 200))
    assert answer["weight_version"] == 4
    assert answer["choices"][0]["weight_versions"] == SPANS
    assert answer["choices"][1]["weight_versions"] == []


def test_vllms_own_spans_are_kept() -> None:
    own = [{"version": "3", "start": 0, "end": 9}]
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "weight_versions": own}]})
    assert json.loads(annotate_json(body.encode(), recorder(), 200))["choices"][0]["weight_versions"] == own


def test_errors_have_the_fleets_format() -> None:
    foreign = json.loads(annotate_json(b'{"detail": "Not Found"}', recorder(), 404))
    assert foreign["error"] == {"type": "not_found", "message": "Not Found", "detail": {}}
    own = json.loads(annotate_json(b'{"error": {"message": "m", "type": "t"}}', recorder(), 400))
    assert own == {"error": {"message": "m", "type": "t", "detail": {}}}


def test_stream_is_parsed_only_after_a_choice_has_finished() -> None:
    made = SpanRecorder(3)
    early = b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\n'
    assert annotate_events(early, made) is early
    made.record(made.open_call(1), SPANS)
    finished = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'
    last = finished + b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    events = annotate_events(last, made).split(b"\n\n")
    assert json.loads(events[0][6:])["choices"][0]["weight_versions"] == SPANS
    assert json.loads(events[1][6:]) == {"choices": [], "weight_version": 4}
    assert events[2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (b"message_delta", b'{"type":"message_delta","delta":{"stop_reason":"end_turn"}}'),
        (b"response.completed", b'{"type":"response.completed","response":{"id":"r","error":null}}'),
    ],
)
def test_last_named_event_has_the_version(name: bytes, data: bytes) -> None:
    annotate = partial(annotate_events, recorder=recorder())
    before = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    assert annotate(before) == before
    named, _, annotated = annotate(b"event: " + name + b"\ndata: " + data + b"\n\n").partition(b"\n")
    assert named == b"event: " + name and annotated.startswith(b"data: {") and annotated.endswith(b"}\n\n")
    answer, expected = json.loads(annotated[len(b"data: ") :]), json.loads(data) | {"weight_version": 4}
    if "response" in expected:  # clients keep this object alone: it is as it is without a stream
        expected["response"]["weight_version"] = 4
    assert answer == expected
    half = b"event: " + name + b'\ndata: {"type'
    assert annotate(half) == half


def test_split_event_is_unchanged() -> None:
    half = b'data: {"choices": [{"ind'
    assert annotate_events(half, recorder()) == half


PART = Part(first_choice=6, created=99)


def test_response_to_a_part_has_renumbered_choices_on_a_second_line() -> None:
    choices = [{"index": index, "text": "a\nb", "finish_reason": "stop"} for index in range(2)]
    body = json.dumps({"id": "x", "created": 1, "choices": choices, "usage": None})
    rest, of_part = annotate_json(body.encode(), recorder(), 200, PART).split(b"\n")
    assert json.loads(rest) == {"id": "x", "created": 99, "usage": None, "weight_version": 4}
    numbered = json.loads(b"[" + of_part + b"]")
    assert [choice["index"] for choice in numbered] == [6, 7]
    assert [choice["weight_versions"] for choice in numbered] == [SPANS, []], "found by vLLM's numbers"


def test_error_of_a_part_is_an_error() -> None:
    error = annotate_json(b'{"error": {"message": "m", "type": "t"}}', recorder(), 400, PART)
    assert json.loads(error) == {"error": {"message": "m", "type": "t", "detail": {}}}


def test_beam_requests_are_recognized_by_their_ids() -> None:
    assert _BEAM.search(f"cmpl-7-0-{random_uuid()}-beam-3")
    assert not _BEAM.search("chatcmpl-a-users-beam-3")


def test_spans_of_unknown_choices_set_the_response_version() -> None:
    made = SpanRecorder(3)
    made.saw([{"version": 4, "start": 0, "end": 1}])
    answer = json.loads(annotate_json(b'{"choices": [{"index": 0, "finish_reason": "length"}]}', made, 200))
    assert answer["weight_version"] == 4 and "weight_versions" not in answer["choices"][0]


def entry(token_id: int, logprob: float) -> GenerateLogProbsContent:
    alternatives = [GenerateLogProb(token_id=each, logprob=logprob) for each in (token_id, token_id + 1)]
    return GenerateLogProbsContent(token_id=token_id, logprob=logprob, top_logprobs=alternatives)


def generated(**fields: Any) -> GenerateTokensResponse:
    logprobs = GenerateLogProbs(content=[entry(17, -0.5), entry(3, -1.5)])
    choice = GenerateTokensChoice(index=0, token_ids=[17, 3], logprobs=logprobs)
    return GenerateTokensResponse(choices=[choice], **fields)


def test_log_probabilities_name_tokens_in_both_formats() -> None:
    body = annotate_json(json.dumps(generated().model_dump()).encode(), SpanRecorder(4), 200)
    (choice,) = json.loads(body)["choices"]
    named = [(entry["token_id"], entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert named == [(17, "token_id:17", -0.5), (3, "token_id:3", -1.5)]
    alternatives = [each["token"] for each in choice["logprobs"]["content"][0]["top_logprobs"]]
    assert alternatives == ["token_id:17", "token_id:18"]


def test_other_log_probabilities_are_unchanged() -> None:
    for logprobs in (
        None,
        {"content": None},
        {"content": [{"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": []}]},
        {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": None, "text_offset": [0]},
    ):
        before = json.dumps(logprobs)
        name_tokens(logprobs)
        assert json.dumps(logprobs) == before
