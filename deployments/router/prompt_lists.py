"""Requests with a list of prompts, of which each is answered by itself.

vLLM seeds every prompt of a list with the request's own `seed` (and the answers to it with `seed`, `seed + 1`
and so on), and searches the beams of each prompt by itself. So the answer to a prompt does not depend on its
place in the list, and a part of the list is answered like the whole. The replicas number the choices as the
whole answer counts them (`deployments.replica.spans`), so that merging parses nothing but the small rest.
"""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.protocol.errors import ReplicaUnavailable

COMPLETIONS = "/v1/completions"
BATCH_CHAT = "/v1/chat/completions/batch"
# What vLLM relates to a request as a whole.
_OF_THE_WHOLE = ("prompt_embeds", "kv_transfer_params", "ec_transfer_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    """A request that can be divided.

    Attributes:
        rest: the body without the list.
        field: the name of the list in the body.
        prompts: each as JSON, since it is only sent on.
        answers: choices for each prompt.
        streams: whether the answer is a server-sent stream.
    """

    rest: Mapping[str, Any]
    field: str
    prompts: Sequence[bytes]
    answers: int
    streams: bool
    request_id: str

    def part(self, start: int, stop: int) -> bytes:
        """The body of a request for the prompts from `start` to `stop` (exclusive)."""
        rest = _json({"request_id": self.request_id, **self.rest})
        prompts = b",".join(self.prompts[start:stop])
        return b'%b,"%b":[%b]}' % (rest[:-1], self.field.encode(), prompts)


def prompt_list(method: str, path: str, asked: Mapping[str, Any], *, in_session: bool) -> PromptList | None:
    """The list of prompts of a request; None if it has none, or is to be answered by one replica.

    A session is answered by its replica. What vLLM would refuse is left to vLLM as it is, so that its error
    is about what the client has sent.

    Args:
        path: without Serve's route prefix.
        asked: the body.
    """
    field = {COMPLETIONS: "prompt", BATCH_CHAT: "messages"}.get(path)
    if method != "POST" or field is None or in_session:
        return None
    prompts = asked.get(field)
    if not (isinstance(prompts, list) and len(prompts) > 1 and _all_alike(prompts, path)):
        return None
    answers = 1 if asked.get("n") is None else asked["n"]
    streams = asked.get("stream") or False
    if type(answers) is not int or answers < 1 or type(streams) is not bool:
        return None
    if any(asked.get(name) is not None for name in _OF_THE_WHOLE):
        return None
    return PromptList(
        rest={name: value for name, value in asked.items() if name != field},
        field=field,
        prompts=[_json(prompt) for prompt in prompts],
        answers=answers,
        streams=streams and path == COMPLETIONS,  # vLLM streams no batch of chats
        request_id=uuid.uuid4().hex,
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _all_alike(prompts: Sequence[Any], path: str) -> bool:
    """Whether all are texts, or all are lists that are not empty: of token ids, or of messages."""
    if path == COMPLETIONS and all(isinstance(prompt, str) for prompt in prompts):
        return True
    if not all(isinstance(prompt, list) and prompt for prompt in prompts):
        return False
    if path == COMPLETIONS:
        return all(type(token) is int and token >= 0 for prompt in prompts for token in prompt)
    return all(isinstance(message, dict) for prompt in prompts for message in prompt)


# A part with fewer sequences is not worth a replica of its own: a decoding step takes nearly as long for one
# sequence as for four.
MIN_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The prompts from `start` to `stop` (exclusive) go to one replica."""

    replica_id: str
    start: int
    stop: int


def split_prompts(
    prompts: int, answers: int, loads: Mapping[str, int], *, least: int = MIN_SEQUENCES
) -> list[Share]:
    """Divide a list of prompts so that the replicas are equally loaded afterwards, as far as it can.

    A share is a run of neighbours in the list, because neighbours are often the same prompt, whose prefix is
    computed once. A replica that is so busy that its share would be too small gets none.

    Args:
        prompts: in the list, at least one.
        answers: to each prompt; they stay together.
        loads: sequences in flight, by replica.
        least: sequences of a share.

    Returns:
        Shares in the order of the list, which cover it; none if it is not to be split.
    """
    total = prompts * answers
    ordered = sorted(loads, key=lambda replica_id: (loads[replica_id], replica_id))
    for count in range(min(len(ordered), prompts), 1, -1):
        chosen = ordered[:count]
        level = (total + sum(loads[replica_id] for replica_id in chosen)) / count
        if level - loads[chosen[-1]] >= max(least, answers):
            return _shares(prompts, {each: (level - loads[each]) / total for each in chosen})
    return []


def _shares(prompts: int, fractions: Mapping[str, float]) -> list[Share]:
    shares, start, covered = [], 0, 0.0
    for replica_id, fraction in fractions.items():
        covered += fraction
        stop = math.floor(covered * prompts + 0.5)
        shares.append(Share(replica_id=replica_id, start=start, stop=stop))
        start = stop
    return shares


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
