"""Requests with a list of prompts, of which each is answered by itself.

vLLM seeds every prompt of a list with the request's own `seed` (and the answers to it with `seed`, `seed + 1`
and so on), and searches the beams of each prompt by itself. So the answer to a prompt does not depend on its
place in the list, and a part of the list is answered like the whole.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
