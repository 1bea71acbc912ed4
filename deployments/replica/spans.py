"""Which version produced which token: read from the engine, written into OpenAI answers.

vLLM reports the spans with a request's last output, but its OpenAI answers do not carry them. The
recorder follows the engine calls of one HTTP request (a context variable connects the two), and the
annotators add `weight_versions` per choice and `weight_version` to the answer. An answer that is a part of
another one is written so that the router need not read it: see `deployments.router.prompt_lists`.
"""

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from deployments.protocol.routing import Part

# Log-probabilities of `/inference/v1/generate` name their tokens as vLLM 0.32 does, and as it did before.
#
# An entry was of OpenAI's shape once, with the token as text: `"token": "token_id:17"`. In 0.32 it is
# `"token_id": 17`. An answer that has both is read by clients of either time: verifiers 0.4 refuses a
# log-probability whose `token` does not name the answer's token id. Streams are vLLM's own.


def name_tokens(logprobs: Any) -> None:
    """Add `token` to each entry of a choice's `logprobs` that has a `token_id`, and to its alternatives."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(entries, list):
        return
    for entry in entries:
        if "token_id" not in entry or "token" in entry:  # OpenAI's shape, as of the other routes
            continue
        entry["token"] = f"token_id:{entry['token_id']}"
        for alternative in entry.get("top_logprobs", ()):
            alternative["token"] = f"token_id:{alternative['token_id']}"


Span = dict[str, int]

# On /v1/messages and /v1/responses events have names; these are the ends of answers.
_NAMED_ENDS = (b"event: message_delta\ndata: {", b"event: response.completed\ndata: {")

RECORDER: ContextVar["SpanRecorder | None"] = ContextVar("span_recorder", default=None)


class SpanRecorder:
    """The spans of one HTTP request, by choice index as the OpenAI answers count it."""

    def __init__(self, version: int) -> None:
        self.version = version  # of the newest token so far
        self.spans: dict[int, list[Span]] = {}
        self.adapter: str | None = None  # the full name of the one that the request uses
        self.looked_up: dict[str, Any] = {}  # names of adapters -> what they stand for in this request
        self.ended = False
        self._at_end: list[Callable[[], None]] = []
        self._choices = 0

    def end(self) -> None:
        """The request has ended: what it holds is free."""
        self.ended = True
        while self._at_end:
            self._at_end.pop()()

    def at_end(self, free: Callable[[], None]) -> None:
        """To be called when the request ends; at once if it has."""
        if self.ended:
            free()
        else:
            self._at_end.append(free)

    def open_call(self, choices: int) -> int:
        """One engine call with `choices` samples begins; returns the index of its first choice."""
        first = self._choices
        self._choices += choices
        return first

    def record(self, choice: int, spans: list[Span]) -> None:
        """The spans of a choice so far."""
        self.spans[choice] = spans
        self.saw(spans)

    def saw(self, spans: list[Span]) -> None:
        """These made a part of the answer, of no known choice."""
        if spans:
            self.version = max(self.version, spans[-1]["version"])


def annotate_json(body: bytes, recorder: SpanRecorder, status: int, part: Part | None = None) -> bytes:
    """The JSON answer with versions, or an error in the shape that all of ours have.

    Anything that is not a JSON object goes out as it came. The answer of a part has two lines: the object
    without its choices, and the choices without brackets.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(answer, dict):
        return body
    if status >= 400:
        if "error" not in answer:  # FastAPI's own, as for a route that does not exist
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


class StreamAnnotator:
    """Rewrites the last events of a server-sent stream; the events before them pass untouched.

    Args:
        part: of which this is the stream; then all events are rewritten.
    """

    def __init__(self, recorder: SpanRecorder, part: Part | None = None) -> None:
        self._recorder = recorder
        self._part = part

    def __call__(self, chunk: bytes) -> bytes:
        # Spans are known once a choice has finished, before vLLM's event for it: no earlier event needs to be
        # parsed.
        if not self._recorder.spans and self._part is None:
            return chunk
        return b"\n\n".join(self._event(event) for event in chunk.split(b"\n\n"))

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            if not event.startswith(_NAMED_ENDS):
                return event
            name, newline, event = event.partition(b"\n")
            return name + newline + self._event(event)
        try:
            data = json.loads(event[len(b"data: ") :])
        except (ValueError, RecursionError):  # an event that the transport split: leave it as it is
            if self._part is not None:
                raise  # its choices would have other numbers
            return event
        if "error" in data:
            return event if self._part is None else b"data: " + _encode(data)
        if self._recorder.spans:
            _annotate(data, self._recorder)
        if self._part is not None:
            _place(data, data["choices"], self._part)
        return b"data: " + _encode(data)


def _place(answer: dict[str, Any], choices: list[dict[str, Any]], part: Part) -> None:
    """Number the choices as the whole answer counts them. Versions are found by vLLM's numbers: first."""
    answer["created"] = part.created
    for choice in choices:
        choice["index"] += part.first_choice


def _encode(answer: Any) -> bytes:
    # "replace": half of a surrogate pair, which JSON may name and UTF-8 has no bytes for.
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _annotate(answer: dict[str, Any], recorder: SpanRecorder) -> None:
    for each in (answer, answer.get("response")):  # which is the whole answer, at the end of /v1/responses
        if isinstance(each, dict):
            each["weight_version"] = recorder.version
            if recorder.adapter is not None:
                each["adapter"] = recorder.adapter
    for choice in _choices(answer):
        if recorder.adapter is not None:
            choice["adapter"] = recorder.adapter
        index = choice.get("index", 0)
        spans = recorder.spans.get(index) if isinstance(index, int) else None
        # /inference/v1/generate has vLLM's own spans already, with its string labels.
        if spans is not None and choice.get("finish_reason") and not choice.get("weight_versions"):
            choice["weight_versions"] = spans


def _choices(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice
