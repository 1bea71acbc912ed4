"""A program that answers lines of JSON: started, asked, and ended with everything that it has started.

It may hang, die, or write what is no answer: each of these is an `Ended` with its last words, which every
question that waits gets. The program ends when its input does, so also when this process is killed.
"""

import asyncio
import json
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from app.jobs.environments.verifiers_program import MARK, STOP_TIMEOUT_S, end_marked

MAX_LINE_BYTES = 1 << 24
MAX_LOG_BYTES = 1 << 16
GRACE_S = STOP_TIMEOUT_S + 5.0  # it ends itself before
LAST_WORDS_S = 1.0  # what it started may hold its output open


class Ended(Exception):
    """The program does not answer any more; the text says why.

    Attributes:
        log: the end of what it wrote for people.
    """

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class Program:
    """One process; `first` is what its first line said."""

    def __init__(self, process: Process, mark: str) -> None:
        self.first: Mapping[str, Any] = {}
        self.ended: str | None = None  # why
        self._process = process
        self._mark = mark
        self._written = b""  # the end of what it wrote for people
        self._asked: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._last = 0
        self._log = asyncio.create_task(self._keep_log())
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Self:
        """Returns when it has written its first line.

        Raises:
            Ended: it does not start, or its first line says an `error`.
        """
        mark = uuid.uuid4().hex
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=MAX_LINE_BYTES,
                env={**environment, MARK: mark},
                start_new_session=True,  # Ctrl-C is for the job, which ends it in order
            )
        except OSError as error:
            raise Ended(f"{command[0]} cannot be run: {error.strerror}") from error
        program = cls(process, mark)
        try:
            async with asyncio.timeout(timeout_s):
                program.first = await program._line()
            if "error" in program.first:
                raise Ended(str(program.first["error"]))
        except (TimeoutError, Ended) as error:
            await program.close(grace_s=0.0)
            slow = f"it took longer than {timeout_s:g} s to start: {program.last_words()}"
            raise Ended(str(error) or slow, program.log()) from None
        except BaseException:  # also a cancellation: the process must not outlive its caller
            await program.close(grace_s=0.0)
            raise
        program._reader = asyncio.create_task(program._read())
        return program

    async def ask(self, **what: Any) -> Mapping[str, Any]:
        """The program's answer; a question that is cancelled is cancelled there too.

        Raises:
            Ended: there will be none.
        """
        if self.ended is not None:
            raise Ended(self.ended, self.log())
        self._last += 1
        number = self._last
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **what})
            return await future
        except asyncio.CancelledError:
            self._write({"id": number, "cancel": True})
            raise
        finally:
            del self._asked[number]

    async def close(self, grace_s: float = GRACE_S) -> None:
        """End the program and everything that it has started; it may take so long for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self._end("it was closed")
            readers = [self._log] if self._reader is None else [self._log, self._reader]
            _, open_still = await asyncio.wait(readers, timeout=LAST_WORDS_S)
            for reader in open_still:  # something that lost its mark holds the other end
                reader.cancel()

    def last_words(self) -> str:
        """The last line of its log that says something; verifiers draws frames around its errors."""
        texts = [line.strip(" │╭╮╰╯─\r") for line in self.log().splitlines()]
        return next((text[:500] for text in reversed(texts) if text), "it said nothing")

    def log(self) -> str:
        """The end of what it has written for people."""
        return self._written.decode(errors="replace")

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _line(self) -> Mapping[str, Any]:
        """The next line.

        Raises:
            Ended: there is none, or it is none of the program's.
        """
        assert self._process.stdout is not None
        try:
            text = await self._process.stdout.readline()
        except ValueError:
            raise Ended(f"it wrote a line of more than {MAX_LINE_BYTES} bytes") from None
        if not text:
            await asyncio.wait([self._log], timeout=LAST_WORDS_S)
            raise Ended(f"its process has ended: {self.last_words()}")
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise Ended(f"it wrote a line that is no answer: {text[:80]!r}")
        return line

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._line()
                future = self._asked.get(answer.get("id", 0))
                if future is not None and not future.done():
                    future.set_result(answer)
        except Ended as error:
            await self._end(str(error))

    async def _keep_log(self) -> None:
        assert self._process.stderr is not None
        while written := await self._process.stderr.read(MAX_LOG_BYTES):
            self._written = (self._written + written)[-MAX_LOG_BYTES:]

    async def _end(self, why: str) -> None:
        """Answer all questions with this, and kill what is left."""
        self.ended = self.ended or why
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Ended(self.ended, self.log()))
        try:  # its output ends a moment before it does
            async with asyncio.timeout(LAST_WORDS_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.to_thread(end_marked, self._mark)
