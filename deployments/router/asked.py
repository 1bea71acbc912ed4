"""What the router reads in a request's body: for how many sequences it asks, and whether it can be divided.

A body of megabytes is read by a process beside the router. Parsing it takes up to a second, during which no
token of any other stream would pass: Python's parsers hold the interpreter, so a thread would not help.

    router ── question, body ──► python -m deployments.router.asked ── Asked, or what is wrong ──► router
"""

import asyncio
import contextlib
import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import BinaryIO

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.router.bounds import check_sequences, sequences
from deployments.router.prompt_lists import PromptList, prompt_list

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
            command = (sys.executable, "-m", "deployments.router.asked")
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
    from deployments.router import (
        asked,
    )  # not `__main__`: what is pickled has the names that the router knows

    asked.serve(sys.stdin.buffer, sys.stdout.buffer)
