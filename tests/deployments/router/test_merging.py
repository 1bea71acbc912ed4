"""One answer of several."""

import json
from typing import Any

import pytest

from deployments.router.merging import MergedStream, PartFailed, merge_answers


def lines(choices: list[Any], **rest: Any) -> bytes:
    """The answer of a part as a replica gives it."""
    return json.dumps(rest).encode() + b"\n" + json.dumps(choices).encode()[1:-1]


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode()


def test_choices_are_joined_and_usage_is_summed() -> None:
    first = {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
    second = {"prompt_tokens": 4, "total_tokens": 9, "prompt_tokens_details": None}
    whole = json.loads(
        merge_answers(
            [
                lines([{"index": 0}, {"index": 1}], id="x", usage=first, weight_version=8, metrics={"a": 1}),
                lines([{"index": 2}], id="x", usage=second, weight_version=7, metrics=None),
            ]
        )
    )
    assert whole == {
        "id": "x",
        "choices": [{"index": 0}, {"index": 1}, {"index": 2}],
        "usage": {"prompt_tokens": 7, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 1}},
        "weight_version": 7,
        "metrics": None,
    }


def test_events_pass_but_for_those_that_are_about_the_whole() -> None:
    merged = MergedStream(2)
    early = event(choices=[{"index": 0, "text": 'of "weight_version": 1 and "choices":[]'}])
    assert merged.add(0, early) == early + b"\n\n"
    assert merged.add(1, b": keep-alive") == b": keep-alive\n\n"
    newest = json.loads(merged.add(0, event(choices=[{"index": 0}], weight_version=9))[6:])
    assert newest["weight_version"] == 9
    oldest = json.loads(merged.add(1, event(choices=[{"index": 1}], weight_version=8))[6:])
    assert oldest["weight_version"] == 8
    assert (
        json.loads(merged.add(0, event(choices=[{"index": 0}], weight_version=9))[6:])["weight_version"] == 8
    )
    for part, tokens in ((0, 3), (1, 4)):
        usage = event(id="x", choices=[], usage={"total_tokens": tokens}, weight_version=9 - part, metrics={})
        assert merged.add(part, usage) == b""
        assert merged.add(part, b"data: [DONE]") == b""
    last, done, nothing = merged.end().split(b"\n\n")
    assert json.loads(last[6:]) == {
        "id": "x",
        "choices": [],
        "usage": {"total_tokens": 7},
        "weight_version": 8,
    }
    assert (done, nothing) == (b"data: [DONE]", b"")


def test_without_usage_the_stream_ends_with_done_alone() -> None:
    assert MergedStream(2).end() == b"data: [DONE]\n\n"


def test_an_error_of_a_part_is_one_of_the_whole() -> None:
    with pytest.raises(PartFailed) as raised:
        MergedStream(2).add(1, event(error={"message": "a fault"}))
    assert raised.value.event == event(error={"message": "a fault"})
