"""A child process that answers lines of JSON. If it hangs, crashes or writes garbage, every pending question
raises `Exited`. It stops, with all that it started, when its input ends, even if this process is killed."""

import asyncio
import json
import tempfile
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from app.jobs.environments.verifiers_program import MARK, STOP_TIMEOUT_S, kill_marked

MAX_LINE_BYTES = 1 << 24
LAST_WORDS_BYTES = 1 << 16
GRACE_S = STOP_TIMEOUT_S + 5.0  # longer than its own limit
LAST_WORDS_S = 1.0  # limit between end of output and exit


class Exited(Exception):
    """The program cannot answer; the text has the reason."""


class Program:
    """`exited`: why it cannot answer. Its log (stderr) is kept if that text names it."""

    def __init__(self, process: Process, mark: str, log: Path) -> None:
        self.exited: str | None = None
        self._log = log
        self._process = process
        self._mark = mark
        self._pending: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._last_id = 0
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Self:
        """Returns after its first line. Raises Exited if it does not start, or the line has an `error`."""
        mark = uuid.uuid4().hex
        try:
            with tempfile.NamedTemporaryFile(prefix="verifiers-", suffix=".log", delete=False) as stderr:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=stderr,
                    limit=MAX_LINE_BYTES,
                    env={**environment, MARK: mark},
                    start_new_session=True,  # Ctrl-C is for the job
                )
        except OSError as error:
            Path(stderr.name).unlink()
            raise Exited(f"{command[0]} cannot be run: {error.strerror}") from error
        program = cls(process, mark, Path(stderr.name))
        try:
            async with asyncio.timeout(timeout_s):
                first = await program._line()
            if "error" in first:
                raise Exited(str(first["error"]))
        except (TimeoutError, Exited) as error:
            slow = f"it took longer than {timeout_s:g} s to start: {program.last_words()}"
            program.exited = program._with_log(str(error) or slow)
            await program.close(grace_s=0.0)
            raise Exited(program.exited) from None
        except BaseException:  # also a cancellation
            await program.close(grace_s=0.0)
            raise
        program._reader = asyncio.create_task(program._read())
        return program

    async def ask(self, **question: Any) -> Mapping[str, Any]:
        """Passes cancellation on. Raises Exited."""
        if self.exited is not None:
            raise Exited(self.exited)
        self._last_id += 1
        number = self._last_id
        self._pending[number] = future = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **question})
            return await future
        except asyncio.CancelledError:
            self._write({"id": number, "cancel": True})
            raise
        finally:
            del self._pending[number]

    async def close(self, grace_s: float = GRACE_S) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self._end("it was closed")
            if self._reader is not None:
                await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
                self._reader.cancel()  # an unmarked process may hold the other end
            if str(self._log) not in str(self.exited):
                self._log.unlink()

    def last_words(self) -> str:
        """The last line of text; verifiers draws frames around errors."""
        with self._log.open("rb") as stream:
            stream.seek(max(0, self._log.stat().st_size - LAST_WORDS_BYTES))
            end = stream.read().decode(errors="replace")
        texts = [line.strip(" │╭╮╰╯─\r") for line in end.splitlines()]
        return next((text[:500] for text in reversed(texts) if text), "it said nothing")

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _line(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        try:
            text = await self._process.stdout.readline()
        except ValueError:
            raise Exited(f"it wrote a line of more than {MAX_LINE_BYTES} bytes") from None
        if not text:
            raise Exited(f"its process has ended: {self.last_words()}")
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise Exited(f"it wrote a line that is no answer: {text[:80]!r}")
        return line

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._line()
                future = self._pending.get(answer.get("id", 0))
                if future is not None and not future.done():
                    future.set_result(answer)
        except Exited as error:
            await self._end(self._with_log(str(error)))

    def _with_log(self, why: str) -> str:
        return f"{why} (its log: {self._log})" if self._log.stat().st_size else why

    async def _end(self, why: str) -> None:
        self.exited = self.exited or why
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Exited(self.exited))
        try:  # its output ends before it exits
            async with asyncio.timeout(LAST_WORDS_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.to_thread(kill_marked, self._mark)
