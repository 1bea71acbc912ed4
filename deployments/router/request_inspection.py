"""Reads a request's body, counts its sequences, and finds a list of prompts to split.

vLLM tokenizes a whole list before the first token, so sequences are bounded here. Only the outermost level of
the JSON is parsed: 10 MB of token lists block the event loop for 24 ms (`json.loads`: 274 ms), 128 KB for 0.3
ms (2026-11-28, two cores).
"""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from deployments.protocol.errors import BodyTooSlow, InvalidRequest, PayloadTooLarge
from deployments.protocol.rollouts import NAMES
from deployments.protocol.routing import DEMANDS
from deployments.router.prompt_lists import PromptList, parse_list, parse_object, prompt_list

GRACE_S = 20.0  # plus the size at this rate:
BYTES_PER_S = 64 << 10
MAX_HEADER_BYTES = 1 << 16
MAX_SEQUENCES = 16384  # per request: each is a task in a router and a place in an engine
ONCE = frozenset(name.encode() for name in (*DEMANDS, *NAMES))
# Every field of vLLM's routes that can hold a list of prompts or texts.
_LISTS = (
    *("prompt", "prompt_embeds", "input", "inputs", "messages", "documents", "query", "queries"),
    *("text_1", "text_2", "data_1", "data_2", "texts", "items"),
)
_COUNTS = ("n", "best_of")
_FIRST_ITEM = re.compile(rb"\[\s*([^\s\]])")


async def read_body(request: Request, max_bytes: int, *, grace_s: float = GRACE_S) -> bytes:
    """A slow client would occupy the router. Raises PayloadTooLarge or BodyTooSlow."""
    body = bytearray()
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(grace_s) as limit:
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise PayloadTooLarge(
                        f"the body must have at most {max_bytes} bytes", {"max_body_bytes": max_bytes}
                    )
                limit.reschedule(begin + grace_s + len(body) / BYTES_PER_S)
    except TimeoutError as error:
        raise BodyTooSlow(
            f"the body did not arrive in time: {len(body)} bytes in "
            f"{asyncio.get_running_loop().time() - begin:.0f} s, expected {BYTES_PER_S} a second",
            {"received_bytes": len(body)},
        ) from error
    return bytes(body)


def check_headers(request: Request) -> None:
    """Ours must come once: a replica might read another value. Raises PayloadTooLarge or InvalidRequest."""
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > MAX_HEADER_BYTES:
        raise PayloadTooLarge(f"the headers must have at most {MAX_HEADER_BYTES} bytes, got {size}")
    names = [name for name, _ in request.headers.raw if name in ONCE]
    if twice := [name.decode() for name in set(names) if names.count(name) > 1]:
        raise InvalidRequest(f"{twice[0]} must come once, got {request.headers.getlist(twice[0])}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    sequences: int
    prompts: PromptList | None


def inspect(body: bytes, method: str, path: str, *, in_session: bool) -> Inspection:
    """vLLM rejects bodies that are no JSON object. Raises InvalidRequest: more than `MAX_SEQUENCES`, or
    nested too deeply."""
    try:
        fields, is_plain = _fields(body)
        count = _sequences(fields)
        if count > MAX_SEQUENCES:
            raise InvalidRequest(
                f"expected at most {MAX_SEQUENCES} sequences in a request (prompts times 'n'), got {count}: "
                "send several",
                {"expected": MAX_SEQUENCES, "actual": count},
            )
        prompts = None if in_session or not is_plain else prompt_list(method, path, fields)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    return Inspection(sequences=count, prompts=prompts)


def _fields(body: bytes) -> tuple[Mapping[str, bytes], bool]:
    """Empty for anything but an object; also whether the body is standard JSON in UTF-8."""
    try:
        return parse_object(body), True
    except msgspec.DecodeError:
        pass
    try:
        return parse_object(_standard_json(body)), False
    except (msgspec.DecodeError, UnicodeError):
        return {}, False


def _standard_json(body: bytes) -> bytes:
    """`json.loads`, vLLM's parser, accepts more than the standard: NaN, half a surrogate pair or UTF-16 must
    not hide a large `n`."""
    text = body.decode(json.detect_encoding(body), "surrogatepass").encode(errors="surrogatepass")
    # Private-use characters: no field name has them.
    return re.sub(rb"NaN|Infinity", b"0", re.sub(rb"\\u[dD][89a-fA-F]", rb"\\ue0", text))


def _sequences(fields: Mapping[str, bytes]) -> int:
    sampling = fields.get("sampling_params", b"")
    places = [fields, parse_object(sampling)] if sampling.startswith(b"{") else [fields]
    completions = max(_count(place.get(name)) for place in places for name in _COUNTS)
    prompts = max((_prompts(name, fields[name]) for name in _LISTS if name in fields), default=1)
    return prompts * completions


def _prompts(name: str, value: bytes) -> int:
    first = _FIRST_ITEM.match(value)
    if first is None or first[1].isdigit() or first[1] in b"-tf":  # token ids: one prompt
        return 1
    if name in ("messages", "input") and first[1] == b"{":  # one conversation
        return 1
    return len(parse_list(value))


def _count(value: bytes | None) -> int:
    if value is None or value[:1] in b"[{":
        return 1
    try:
        return max(1, int(float(json.loads(value))))
    except (ValueError, TypeError, OverflowError):
        return 1
