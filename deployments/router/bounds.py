"""What one request may ask for: the size of its headers, and the number of sequences to generate.

The engine bounds the rest: tokens by `engine.max_model_len`, logprobs by `max_logprobs` of vLLM. Lists
of prompts are bounded here, because vLLM reads all of them before it asks for the first answer.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from deployments.errors import InvalidRequest, PayloadTooLarge

MAX_HEADER_BYTES = 1 << 16
# Whatever vLLM's routes call a list of prompts or texts.
_MANY = (
    *("prompt", "prompt_embeds", "input", "inputs", "messages", "documents", "query", "queries"),
    *("text_1", "text_2", "data_1", "data_2", "texts", "items"),
)
_COUNTS = ("n", "best_of")
_CONVERSATIONS = re.compile(rb'"messages"\s*:\s*\[\s*\[')
_HINTS = tuple(f'"{name}"'.encode() for name in (*_MANY, *_COUNTS) if name != "messages")


def check_headers(request: Request) -> None:
    """Return if the headers are not too large.

    Raises:
        PayloadTooLarge: they are.
    """
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > MAX_HEADER_BYTES:
        raise PayloadTooLarge(f"the headers must have at most {MAX_HEADER_BYTES} bytes, got {size}")


def check_sequences(body: bytes, limit: int) -> dict[str, Any]:
    """Return if the body asks for at most so many sequences: prompts times answers to each.

    What is not JSON, or not as vLLM expects it, is left to vLLM, which says what is wrong with it.

    Returns:
        The body's JSON object; empty if it has none, or cannot ask for many.

    Raises:
        InvalidRequest: it asks for more, or is nested too deeply.
    """
    if not _may_ask_for_many(body):
        return {}
    try:
        asked = json.loads(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError:
        return {}
    if not isinstance(asked, dict):
        return {}
    if (count := sequences(asked)) > limit:
        raise InvalidRequest(
            f"expected at most {limit} sequences in a request (prompts times 'n'), got {count}: "
            "send several, or set 'router.max_sequences'",
            {"expected": limit, "actual": count},
        )
    return asked


def sequences(asked: Mapping[str, Any]) -> int:
    """How many sequences a request asks for."""
    sampling = asked.get("sampling_params")
    places = [asked, sampling] if isinstance(sampling, dict) else [asked]
    answers = max(_count(place.get(name)) for place in places for name in _COUNTS)
    return max(_prompts(name, asked.get(name)) for name in _MANY) * answers


def _may_ask_for_many(body: bytes) -> bool:
    """Whether it is worth parsing: most requests are chats with one answer."""
    # An escape can hide a name, and other encodings than UTF-8 have zeros in every name.
    hinted = any(hint in body for hint in (*_HINTS, b"\\u00", b"\0"))
    return hinted or _CONVERSATIONS.search(body) is not None


def _prompts(name: str, value: Any) -> int:
    if not isinstance(value, list) or not value:
        return 1
    if name == "messages":  # one conversation, or a list of them
        return len(value) if isinstance(value[0], list) else 1
    return 1 if isinstance(value[0], int) else len(value)  # token ids are one prompt


def _count(value: Any) -> int:
    """A number as vLLM's models take it, which is text as well."""
    if not isinstance(value, int | float | str):
        return 1
    try:
        return max(1, int(float(value)))
    except (ValueError, OverflowError):
        return 1
