"""Environments of verifiers, rolled out by its own program in a Python of its own, since its pins fight ours.

    Verifiers ── task, address ──► verifiers_program.py ── chat, generate ──► Relay ──► fleet
        ▲                                │                                      │
        └──────── reward, session ───────┘        tokens, versions, values ─────┘

verifiers plays the agent, with its tools and its harness, and judges it. What is learned from is what the
relay saw: tokens as the engine sampled them, each with its log-probability and version.
"""

import asyncio
import json
import os
import shlex
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.jobs.attempts import Attempt
from app.jobs.environments.environment import HELD_OUT, all_of
from app.jobs.environments.relay import Relay, samples
from app.jobs.rewards import checked
from app.jobs.rollouts import Policy, Unanswered

PROGRAM = Path(__file__).with_name("verifiers_program.py")
START_TIMEOUT_S = 600.0  # imports, and data sets that are downloaded
MAX_LINE_BYTES = 1 << 24
MAX_FAILURES = 20  # of rollouts in a row, after which the environment is called broken


@dataclass(slots=True)
class Verifiers:
    """Attempts at the tasks of a verifiers environment.

    Args:
        command: what `vf-eval` takes, such as `gsm8k @ config.toml --select.limit 100`.
        python: of an environment that has verifiers.
        rollout_timeout_s: of one attempt; verifiers has limits of its own.
    """

    command: str
    python: str = ".venv-verifiers/bin/python"
    rollout_timeout_s: float = 3600.0
    path: str = ""  # PYTHONPATH of that Python, for task sets that are not installed
    _relay: Relay = field(init=False, default_factory=Relay)
    _program: "_Program | None" = field(init=False, default=None)
    _starting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _failures: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not Path(self.python).exists():
            raise ValueError(
                f"verifiers runs in a Python of its own: expected one at 'python', got {self.python!r}"
            )
        if not shlex.split(self.command):
            raise ValueError("'command' must be what vf-eval takes, such as 'gsm8k @ config.toml'")

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        """`count` rollouts of this task.

        Raises:
            Unanswered: a rollout failed, or the fleet did not answer it.
            Moved, FleetError: as the policy.
            ValueError: the program does not start, or all rollouts fail.
        """
        program = await self._running()
        return await all_of(self._attempt(program, number, policy) for _ in range(count))

    async def _attempt(self, program: "_Program", number: int, policy: Policy) -> Attempt:
        async with self._relay.rollout(policy) as rollout:
            try:
                async with asyncio.timeout(self.rollout_timeout_s):
                    result = await program.ask(task=number % HELD_OUT, url=rollout.url, model=policy.name)
            except TimeoutError:
                result = {"error": f"it took longer than {self.rollout_timeout_s:g} s"}
        if rollout.failure is not None:
            raise rollout.failure
        played = [each for each in rollout.exchanges if each.session in result.get("sessions", ())]
        if "error" in result or not played:
            self._fail(str(result.get("error", "the agent asked the model nothing")))
        self._failures = 0
        reward = checked(result["reward"], "the environment")
        return Attempt(samples=samples(played), reward=reward, text=result["text"])

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise ValueError(
                f"{self._failures} rollouts of verifiers in a row failed, the last one: {reason}"
            )
        raise Unanswered(f"verifiers: {reason}")

    async def _running(self) -> "_Program":
        async with self._starting:
            if self._program is None or self._program.ended:
                self._program = await _Program.start(self.python, shlex.split(self.command), self.path)
            return self._program


class _Program:
    """verifiers' process; it ends with its standard input, so also when the job is killed."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._asked: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._last = 0
        self.ended = False
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: str, arguments: Sequence[str], path: str) -> "_Program":
        """Returns when it can be asked.

        Raises:
            ValueError: it does not start; the message has its last line.
        """
        descriptor, name = tempfile.mkstemp(prefix="verifiers-", suffix=".log")
        with open(descriptor, "wb") as log:
            process = await asyncio.create_subprocess_exec(
                python,
                "-P",  # else this directory would shadow packages of the same names
                str(PROGRAM),
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=MAX_LINE_BYTES,
                env={**os.environ, "PYTHONPATH": path},
            )
        program = cls(process, Path(name))
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise ValueError(f"verifiers did not start within {START_TIMEOUT_S:g} s; see {name}") from None
        first = json.loads(line) if line else {"error": program.last_words()}
        if "error" in first:
            raise ValueError(f"verifiers does not start: {first['error']}; its log is {name}")
        program._reader = asyncio.create_task(program._read())
        return program

    async def ask(self, **what: Any) -> Mapping[str, Any]:
        """The program's answer; an `error` also if it ends before."""
        assert self._process.stdin is not None
        self._last += 1
        number = self._last
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        try:
            if self.ended:
                return {"error": f"its process has ended: {self.last_words()}"}
            self._process.stdin.write(json.dumps({"id": number, **what}).encode() + b"\n")
            return await future
        finally:
            del self._asked[number]

    def last_words(self) -> str:
        """The last line of its log that says something; verifiers draws frames around its errors."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        texts = [line.strip(" │╭╮╰╯─") for line in lines]
        return next((text[:500] for text in reversed(texts) if text), "it said nothing")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                future = self._asked.get(answer.get("id", 0))
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:  # a line that is none of ours, or too long, ends it too
            self._end()

    def _end(self) -> None:
        self.ended = True
        if self._process.returncode is None:
            self._process.kill()
        for future in self._asked.values():
            if not future.done():
                future.set_result({"error": f"its process has ended: {self.last_words()}"})
