"""Which version generated which token: read from the engine, added to OpenAI responses.

A `SpanRecorder` follows one HTTP request's engine calls (a context variable); annotators add
`weight_versions` per choice and `weight_version` per response.
"""

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from deployments.protocol.routing import Part
from deployments.replica.capture import Capture


def name_tokens(logprobs: Any) -> None:
    """Add `"token": "token_id:17"` to entries of /inference/v1/generate: vLLM 0.32 dropped it, verifiers 0.4
    requires it."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list):
        return
    for entry in entries:
        if "token_id" not in entry or "token" in entry:  # OpenAI's format, as on other routes
            continue
        entry["token"] = f"token_id:{entry['token_id']}"
        for alternative in entry.get("top_logprobs", ()):
            alternative["token"] = f"token_id:{alternative['token_id']}"


Span = dict[str, int]

# Last events of /v1/messages and /v1/responses, whose events have names.
_NAMED_ENDS = (b"event: message_delta\ndata: {", b"event: response.completed\ndata: {")

RECORDER: ContextVar["SpanRecorder | None"] = ContextVar("span_recorder", default=None)


class SpanRecorder:
    def __init__(self, version: int) -> None:
        self.version = version
        self.spans: dict[int, list[Span]] = {}
        self.adapter: str | None = None
        self.looked_up: dict[str, Any] = {}
        self.capture: Capture | None = None
        self.ended = False
        self._at_end: list[Callable[[], None]] = []
        self._choices = 0

    def end(self) -> None:
        self.ended = True
        while self._at_end:
            self._at_end.pop()()

    def at_end(self, free: Callable[[], None]) -> None:
        """At once if the request has ended."""
        if self.ended:
            free()
        else:
            self._at_end.append(free)

    def open_call(self, choices: int) -> int:
        """Returns the index of the first choice."""
        first = self._choices
        self._choices += choices
        return first

    def record(self, choice: int, spans: list[Span]) -> None:
        self.spans[choice] = spans
        self.saw(spans)

    def saw(self, spans: list[Span]) -> None:
        if spans:
            self.version = max(self.version, spans[-1]["version"])


def annotate_json(body: bytes, recorder: SpanRecorder, status: int, part: Part | None = None) -> bytes:
    """The JSON response with versions, or an error in the fleet's format; other bodies are unchanged.

    The response to a part has two lines: the object without its choices, and the choices without brackets.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(answer, dict):
        return body
    if status >= 400:
        if "error" not in answer:  # FastAPI's own, as for an unknown route
            message = str(answer.get("detail", answer))
            answer = {"error": {"type": "not_found" if status == 404 else "http_error", "message": message}}
        if isinstance(answer["error"], dict):
            answer["error"].setdefault("detail", {})
    else:
        _annotate(answer, recorder)
        for choice in _choices(answer):
            name_tokens(choice.get("logprobs"))
        if part is not None:
            choices = answer.pop("choices")
            _place(answer, choices, part)
            return _encode(answer) + b"\n" + _encode(choices)[1:-1]
    return _encode(answer)


def annotate_events(chunk: bytes, recorder: SpanRecorder) -> bytes:
    """A piece of a stream with versions."""
    # Spans are known when a choice finishes, before vLLM's event for it: do not parse earlier events.
    if not recorder.spans:
        return chunk
    return b"\n\n".join(_annotate_event(event, recorder) for event in chunk.split(b"\n\n"))


def _annotate_event(event: bytes, recorder: SpanRecorder) -> bytes:
    if not event.startswith(b"data: {"):
        if not event.startswith(_NAMED_ENDS):
            return event
        name, newline, event = event.partition(b"\n")
        return name + newline + _annotate_event(event, recorder)
    try:
        data = json.loads(event[len(b"data: ") :])
    except (ValueError, RecursionError):  # split by the transport: leave it
        return event
    if "error" in data:
        return event
    _annotate(data, recorder)
    return b"data: " + _encode(data)


def _place(answer: dict[str, Any], choices: list[dict[str, Any]], part: Part) -> None:
    """Renumber choices for the whole response; call it after `_annotate`, which uses vLLM's numbers."""
    answer["created"] = part.created
    for choice in choices:
        choice["index"] += part.first_choice


def _encode(answer: Any) -> bytes:
    # "replace": a lone surrogate, allowed in JSON but not in UTF-8.
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _annotate(answer: dict[str, Any], recorder: SpanRecorder) -> None:
    for each in (answer, answer.get("response")):  # the last event of /v1/responses
        if isinstance(each, dict):
            each["weight_version"] = recorder.version
            if recorder.adapter is not None:
                each["adapter"] = recorder.adapter
    for choice in _choices(answer):
        if recorder.adapter is not None:
            choice["adapter"] = recorder.adapter
        index = choice.get("index", 0)
        spans = recorder.spans.get(index) if isinstance(index, int) else None
        # /inference/v1/generate already has vLLM's spans, with string labels.
        if spans is not None and choice.get("finish_reason") and not choice.get("weight_versions"):
            choice["weight_versions"] = spans


def _choices(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice
