"""Environments of verifiers, in a Python of its own, because its pins conflict with ours.

    Verifiers ── task, address ──► verifiers_program.py ── chat, generate ──► Relay ──► fleet
        ▲                                │
        └──────── reward, session ───────┘

verifiers runs the agent and its judge. The job rewards the rollout of the agent's session.
"""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.client.announcement import announced
from app.jobs.environments.environment import HELD_OUT, Environment
from app.jobs.environments.program import Exited, Program
from app.jobs.environments.relay import AgentSession, Relay
from app.jobs.groups import Rollout
from app.jobs.policy import ATTEMPTS, Policy, Unanswered
from app.jobs.rewards import checked
from app.jobs.task_groups import all_of

PROGRAM = Path(__file__).with_name("verifiers_program.py")
START_TIMEOUT_S = 600.0  # includes downloads of data sets
MAX_FAILURES = 20  # consecutive failed problems
# Environments run foreign code, and code of a model: tokens of the fleet, a teacher and a judge, and an
# address that has one, stay with the job.
OURS = "SLIPSTREAM_"
NO_PROXY = ("no_proxy", "NO_PROXY")  # the relay is on this host


class VerifiersSettings(BaseModel):
    """`--environment-settings` of verifiers.

    Attributes:
        command: what `vf-eval` takes, such as `gsm8k @ config.toml --select.limit 100`.
        eval_command: the same for held-out tasks.
        rollout_timeout_s: per rollout, beside verifiers' own limits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    eval_command: str | None = None
    python: str = ".venv-verifiers/bin/python"
    rollout_timeout_s: float = Field(default=3600.0, gt=0)
    variables: Mapping[str, str] = Field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)

    @field_validator("command", "eval_command")
    @classmethod
    def _has_words(cls, command: str | None) -> str | None:
        if command is not None and not shlex.split(command):
            raise ValueError("expected what vf-eval takes, such as 'gsm8k @ config.toml'")
        return command

    def held_out(self) -> Self:
        if self.eval_command is None:
            raise ValueError("--eval-every with verifiers needs 'eval_command' in --environment-settings")
        return self.model_copy(update={"command": self.eval_command})


class Failed(Exception):
    """A rollout failed, through no fault of the model."""


@dataclass(slots=True)
class Verifiers(Environment):
    settings: VerifiersSettings
    _relay: Relay = field(init=False, default_factory=Relay)
    _program: Program | None = field(init=False, default=None)
    _starting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _failures: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not Path(self.settings.python).exists():
            raise ValueError(
                "verifiers runs in a Python of its own (docs/guides/environments.md says how to make it): "
                f"expected one at 'python', got {self.settings.python!r}"
            )

    async def sample(self) -> str:
        return f"verifiers plays: vf-eval {' '.join(self.settings.arguments)}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._relay.listening():
            try:
                with announced(f"RL job: starting verifiers' {self.settings.arguments[0]}"):
                    await self._started()
                yield
            finally:
                if self._program is not None:
                    await self._program.close()

    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        """Raises Unanswered if a rollout failed each time, and ValueError if the program does not restart or
        too many problems in a row failed."""
        try:
            made = await all_of(self._rollout(number, policy) for _ in range(count))
        except Unanswered as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise ValueError(
                    f"{self._failures} problems of verifiers in a row have failed, the last one: {error}"
                ) from error
            raise
        self._failures = 0
        return made

    async def _rollout(self, number: int, policy: Policy) -> Rollout:
        reason = ""
        for _ in range(ATTEMPTS):
            async with self._relay.session(policy) as session:
                try:
                    return await self._run_agent(number, session)
                except (Failed, Exited) as error:
                    reason = str(error)
            if session.refused is not None:
                break
        raise Unanswered(f"verifiers: {reason}")

    async def _run_agent(self, number: int, session: AgentSession) -> Rollout:
        program = await self._started()
        asked = program.ask(task=number % HELD_OUT, url=session.url, model=session.policy.name)
        try:
            async with asyncio.timeout(self.settings.rollout_timeout_s):
                result = await asked
        except TimeoutError:
            raise Failed(f"a rollout took longer than {self.settings.rollout_timeout_s:g} s") from None
        if session.failure is not None:  # the agent has got errors since
            raise session.failure
        session.over = True
        name = next((each for each in result.get("sessions", ()) if each in session.answers), "")
        answers = session.answers.get(name, []) if name else []
        if "error" not in result and answers:
            reward, text = checked(result["reward"], "the environment"), result["text"]
            cut = any(answer.finish_reason == "length" for answer in answers)
        elif answers and session.refused is not None:  # the conversation exceeds the engine's context
            reward, text, cut = 0.0, " | ".join(answer.text for answer in answers), True
        else:
            raise Failed(str(result.get("error", "the agent asked the model nothing")))
        return Rollout(
            id=session.rollouts[name],
            reward=reward,
            text=text,
            tokens=sum(len(answer.token_ids) for answer in answers),
            cut=cut,
            turns=len(answers),
        )

    async def _started(self) -> Program:
        async with self._starting:
            if self._program is None or self._program.exited is not None:
                if self._program is not None:
                    await self._program.close()
                # -P: modules of this directory would shadow packages
                command = [self.settings.python, "-P", str(PROGRAM), *self.settings.arguments]
                try:
                    self._program = await Program.start(command, self._environment(), START_TIMEOUT_S)
                except Exited as error:
                    raise ValueError(f"verifiers does not start: {error}") from error
            return self._program

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        direct = {name: ",".join(filter(None, (kept.get(name), "127.0.0.1"))) for name in NO_PROXY}
        return {**kept, **direct, "PYTHONPATH": "", **self.settings.variables}
