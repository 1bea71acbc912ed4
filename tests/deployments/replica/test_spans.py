import json

from deployments.replica.spans import SpanRecorder, StreamAnnotator, annotate_json

SPANS = [{"version": 3, "start": 0, "end": 5}, {"version": 4, "start": 5, "end": 9}]


def recorder() -> SpanRecorder:
    made = SpanRecorder(3)
    first = made.open_call(2)
    made.record(first, SPANS)
    made.record(first + 1, [])
    return made


def test_choices_of_several_calls_are_numbered_on() -> None:
    made = SpanRecorder(0)
    assert [made.open_call(2), made.open_call(1), made.open_call(2)] == [0, 2, 3]


def test_an_answer_gains_versions_per_choice() -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "stop"}]}
    )
    answer = json.loads(annotate_json(body.encode(), recorder(), 200))
    assert answer["weight_version"] == 4
    assert answer["choices"][0]["weight_versions"] == SPANS
    assert answer["choices"][1]["weight_versions"] == []


def test_vllms_own_spans_stay_as_they_are() -> None:
    own = [{"version": "3", "start": 0, "end": 9}]
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "weight_versions": own}]})
    assert json.loads(annotate_json(body.encode(), recorder(), 200))["choices"][0]["weight_versions"] == own


def test_errors_have_one_shape() -> None:
    foreign = json.loads(annotate_json(b'{"detail": "Not Found"}', recorder(), 404))
    assert foreign["error"] == {"type": "not_found", "message": "Not Found", "detail": {}}
    own = json.loads(annotate_json(b'{"error": {"message": "m", "type": "t"}}', recorder(), 400))
    assert own == {"error": {"message": "m", "type": "t", "detail": {}}}


def test_what_is_no_json_object_passes() -> None:
    for body in (b"plain", b"[1]", b""):
        assert annotate_json(body, recorder(), 200) == body


def test_a_stream_is_touched_only_after_a_choice_has_finished() -> None:
    made = SpanRecorder(3)
    annotate = StreamAnnotator(made)
    early = b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\n'
    assert annotate(early) is early
    made.record(made.open_call(1), SPANS)
    finished = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'
    last = finished + b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    events = annotate(last).split(b"\n\n")
    assert json.loads(events[0][6:])["choices"][0]["weight_versions"] == SPANS
    assert json.loads(events[1][6:]) == {"choices": [], "weight_version": 4}
    assert events[2:] == [b"data: [DONE]", b""]


def test_an_event_that_is_cut_in_two_passes_whole() -> None:
    annotate = StreamAnnotator(recorder())
    half = b'data: {"choices": [{"ind'
    assert annotate(half) == half
