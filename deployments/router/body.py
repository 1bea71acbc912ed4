"""What the router reads of a request: its body, how many sequences it asks for, whether it can be divided.

A request that is being read has a place among those that the router admits. Clients that send slowly, or stop
in the middle, would keep everybody else out: a body is bounded in size, and in the time that it takes.

The engine bounds the rest: tokens by `engine.max_model_len`, logprobs by `max_logprobs` of vLLM. Lists
of prompts are bounded here, because vLLM reads all of them before it asks for the first answer.

A body of megabytes is read by a process beside the router. Parsing it takes up to a second, during which no
token of any other stream would pass: Python's parsers hold the interpreter, so a thread would not help.

    router ── question, body ──► python -m deployments.router.body ── Asked, or what is wrong ──► router
"""

import asyncio
import contextlib
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.requests import Request

from deployments.host.logs import serve_logger
from deployments.protocol.errors import BodyTooSlow, InvalidRequest, PayloadTooLarge, SlipstreamError
from deployments.router.prompt_lists import PromptList, prompt_list

GRACE_S = 20.0  # and this much more for each byte that has arrived:
BYTES_PER_S = 64 << 10


async def read_body(request: Request, max_bytes: int, *, grace_s: float = GRACE_S) -> bytes:
    """The request's body.

    Args:
        grace_s: how long it may take, beside the time for its size at `BYTES_PER_S`.

    Raises:
        PayloadTooLarge: it has more than `max_bytes`.
        BodyTooSlow: it did not arrive in time.
    """
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


LARGE_BYTES = 128 << 10  # a smaller one is read in milliseconds
READ_TIMEOUT_S = 60.0  # several large ones wait for each other
_LENGTHS = struct.Struct("!II")  # of the pickled question or answer, and of the body
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known of a request without its body.

    Attributes:
        path: without Serve's route prefix.
        in_session: one replica answers it whole.
    """

    method: str
    path: str
    in_session: bool
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a body asks for.

    Attributes:
        prompts: None: it is not divided.
    """

    sequences: int
    prompts: PromptList | None


def read_asked(question: Question, body: bytes) -> Asked:
    """Read a body.

    Raises:
        InvalidRequest: it asks for too much, or is nested too deeply.
    """
    asked = check_sequences(body, question.max_sequences)
    return Asked(
        sequences=sequences(asked) if asked else 1,
        prompts=prompt_list(question.method, question.path, asked, in_session=question.in_session),
    )


class BodyReader:
    """Reads bodies: small ones here, large ones in a process that starts with the first of them."""

    def __init__(self, *, large_bytes: int = LARGE_BYTES) -> None:
        self._large_bytes = large_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def read(self, question: Question, body: bytes) -> Asked:
        """As `read_asked`."""
        if len(body) < self._large_bytes:
            return read_asked(question, body)
        answer: Asked | SlipstreamError
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._turn:
                answer = await self._ask(question, body)
        except (OSError, EOFError, TimeoutError) as error:  # it has ended, or stands still
            logger.warning("a large body is read in the router: %s: %s", type(error).__name__, error)
            return read_asked(question, body)
        if isinstance(answer, SlipstreamError):
            raise answer
        return answer

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, question: Question, body: bytes) -> Asked | SlipstreamError:
        if self._process is None:
            command = (sys.executable, "-m", "deployments.router.body")
            pipe = asyncio.subprocess.PIPE
            path = os.pathsep.join(filter(None, sys.path))  # this process may have found our code elsewhere
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env={**os.environ, "PYTHONPATH": path}
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        whole = False
        try:
            head = pickle.dumps(question)
            process.stdin.writelines((_LENGTHS.pack(len(head), len(body)), head, body))
            await process.stdin.drain()
            length, _ = _LENGTHS.unpack(await process.stdout.readexactly(_LENGTHS.size))
            answer: Asked | SlipstreamError = pickle.loads(await process.stdout.readexactly(length))
            whole = True
            return answer
        finally:
            if not whole:  # also when the client has left: what comes next on the pipe is not known
                await self.close()


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until there are no more."""
    while head := questions.read(_LENGTHS.size):
        question_bytes, body_bytes = _LENGTHS.unpack(head)
        question: Question = pickle.loads(questions.read(question_bytes))
        answer: Asked | SlipstreamError
        try:
            answer = read_asked(question, questions.read(body_bytes))
        except SlipstreamError as error:
            answer = error
        pickled = pickle.dumps(answer)
        answers.write(_LENGTHS.pack(len(pickled), 0) + pickled)
        answers.flush()


if __name__ == "__main__":
    from deployments.router import body  # not `__main__`: what is pickled has the names that the router knows

    body.serve(sys.stdin.buffer, sys.stdout.buffer)
