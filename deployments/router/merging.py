"""One answer of several: pure, on bytes.

The replicas have done the work that grows with an answer: they number the choices as the whole answer counts
them, and give its list of choices on a line of its own (`deployments.replica.spans`). Here nothing but the
small rest is parsed.
"""

import json
from collections.abc import Sequence
from typing import Any

from deployments.errors import ReplicaUnavailable

_EVENT = b"data: "
_DONE = b"[DONE]"
_STOPPED = _EVENT + json.dumps({"error": {"type": ReplicaUnavailable.type}}).encode().rstrip(b"}")


class PartFailed(Exception):
    """vLLM ended the stream of a part with an error.

    Args:
        event: which says so.
    """

    def __init__(self, event: bytes) -> None:
        super().__init__(event.decode(errors="replace"))
        self.event = event


def is_stop(event: bytes) -> bool:
    """Whether this ended the stream of a replica that is stopped in order: another one may answer."""
    return event.startswith(_STOPPED)


def merge_answers(parts: Sequence[bytes]) -> bytes:
    """The JSON answer to a list of prompts.

    Args:
        parts: in the order of the list; each has two lines, the answer without its choices and the choices.
    """
    rests, choices = [], []
    for part in parts:
        rest, _, of_part = part.partition(b"\n")
        rests.append(json.loads(rest))
        choices.append(of_part)
    whole = rests[0]
    whole["usage"] = _sum([rest.get("usage") for rest in rests])
    whole["weight_version"] = min(rest["weight_version"] for rest in rests)
    if "metrics" in whole:
        whole["metrics"] = None  # vLLM has them for a single prompt only
    return _encode(whole)[:-1] + b',"choices":[' + b",".join(choices) + b"]}"


class MergedStream:
    """The events of a stream, from those of the parts.

    Args:
        parts: how many there are.
    """

    def __init__(self, parts: int) -> None:
        self._versions: list[int | None] = [None] * parts
        self._usages: list[Any] = [None] * parts
        self._last: dict[str, Any] | None = None  # the event that has the usage

    def add(self, part: int, event: bytes) -> bytes:
        """What the client gets of an event, without the empty line at its end; nothing, for some.

        Raises:
            PartFailed: the event is an error.
        """
        if not event.startswith(_EVENT):
            return event + b"\n\n"  # a comment
        data = event[len(_EVENT) :]
        if data == _DONE:
            return b""
        if data.startswith(b'{"error"'):
            raise PartFailed(event)
        # In a text its quotes would be escaped.
        if b'"weight_version":' not in data and b'"choices":[]' not in data:
            return event + b"\n\n"
        whole = json.loads(data)
        if "weight_version" in whole:
            self._versions[part] = whole["weight_version"]
            whole["weight_version"] = self._oldest()
        if whole.get("choices") == [] and whole.get("usage") is not None:
            self._usages[part] = whole["usage"]
            self._last = whole
            return b""
        return _EVENT + _encode(whole) + b"\n\n"

    def end(self) -> bytes:
        """The last events, when all parts have ended."""
        done = _EVENT + _DONE + b"\n\n"
        if self._last is None:
            return done
        self._last["usage"] = _sum(self._usages)
        self._last.pop("metrics", None)
        if "weight_version" in self._last:
            self._last["weight_version"] = self._oldest()
        return _EVENT + _encode(self._last) + b"\n\n" + done

    def _oldest(self) -> int:
        return min(version for version in self._versions if version is not None)


def _sum(values: Sequence[Any]) -> Any:
    """The sums of numbers, and of the numbers in objects; None if there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    if not isinstance(there[0], dict):
        return sum(there)
    names = dict.fromkeys(name for value in there for name in value)
    return {name: _sum([value.get(name) for value in there]) for name in names}


def _encode(value: dict[str, Any]) -> bytes:
    # "replace": half of a surrogate pair, which JSON may name and UTF-8 has no bytes for.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
