"""Tasks: where prompts come from, and how their answers are scored.

The default is reasoning-gym's `chain_sum` with two one-digit terms, of which the small built-in model solves
one in ten. Solved examples in the prompt would make all answers of a group alike.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from app.jobs.user_code import blamed, imported

# (one line of the prompt file, or reasoning-gym's entry; the graded part of the answer) -> the reward
Reward = Callable[[Mapping[str, Any], str], float]
Message = dict[str, str]

# In "-2" the minus is a sign; in "5 - 3" and "7-8" it is not.
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number of the answer: "6 + 2 = 8." is graded as "8"."""
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


class Extraction(StrEnum):
    """The part of an answer that is graded."""

    LAST_NUMBER = "last-number"
    WHOLE = "whole"
    FIRST_LINE = "first-line"

    def of(self, answer: str) -> str:
        match self:
            case Extraction.LAST_NUMBER:
                return last_number(answer)
            case Extraction.FIRST_LINE:
                return answer.strip().partition("\n")[0].strip()
            case Extraction.WHOLE:
                return answer.strip()


def load_reward(path: str) -> Reward:
    """A reward by its import path, `package.module:function`; called as `function(entry, answer)`."""
    function = imported(path, "--reward")
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise ValueError(f"--reward {path!r} must take (entry, answer): {error}") from error
    loaded: Reward = function
    return loaded


def checked(reward: Any, source: str) -> float:
    """The reward as a number.

    Raises:
        ValueError: it is not a finite number.
    """
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise ValueError(f"{source} must return a finite number, got {reward!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt, and what its score depends on."""

    messages: list[Message]
    entry: Mapping[str, Any]  # reasoning-gym's entry, or a line of the prompt file


class Task(Protocol):
    """A source of problems that scores their answers."""

    def problem(self, number: int) -> Problem:
        """The same problem for the same number, in every process."""

    def score(self, problem: Problem, answer: str) -> float:
        """The reward of an answer."""
        ...


class ReasoningGymTask:
    """A data set of reasoning-gym; an empty `instruction` leaves the system message to the chat template."""

    def __init__(
        self, name: str, settings: Mapping[str, Any], *, instruction: str, seed: int, extract: Extraction
    ) -> None:
        import reasoning_gym

        # reasoning-gym draws problem i from Random(seed + i): adjacent seeds give the same problems, shifted.
        spread = (seed + 1) * 1_000_003
        try:
            self._problems = reasoning_gym.create_dataset(name, seed=spread, size=1 << 40, **settings)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"reasoning-gym refuses {name!r} with {dict(settings)}: {error}") from error
        self._extract = extract
        self._head = [_message("system", instruction)] if instruction else []

    def problem(self, number: int) -> Problem:
        entry = self._problems[number]
        return Problem(messages=[*self._head, _message("user", entry["question"])], entry=entry)

    def score(self, problem: Problem, answer: str) -> float:
        return checked(self._problems.score_answer(self._extract.of(answer), problem.entry), "reasoning-gym")


class PromptFileTask:
    """Prompts from a JSON Lines file, which repeats, scored by the user's own function.

    Each line has `messages` (a conversation) or `prompt` (a user's message), and whatever the reward needs.

    Raises:
        ValueError: no prompts, or a line without one; the message has the line's number.
    """

    def __init__(self, path: Path, reward: Reward, *, extract: Extraction) -> None:
        self._reward = reward
        self._extract = extract
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise ValueError(f"--prompts {path} cannot be read: {error}") from error
        self._problems = [_line(path, number, line) for number, line in enumerate(lines, start=1)]
        if not self._problems:
            raise ValueError(f"--prompts {path} must have at least one line, got none")

    def problem(self, number: int) -> Problem:
        return self._problems[number % len(self._problems)]

    def score(self, problem: Problem, answer: str) -> float:
        with blamed("the reward"):
            reward = self._reward(problem.entry, self._extract.of(answer))
        return checked(reward, "the reward")


def _line(path: Path, number: int, line: str) -> Problem:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number} must be JSON: {error}") from error
    if not isinstance(entry, dict) or not ("messages" in entry or "prompt" in entry):
        raise ValueError(f"{path}:{number} must be an object with 'messages' or 'prompt', got {line[:80]!r}")
    messages: Sequence[Message] = entry.get("messages") or [_message("user", str(entry["prompt"]))]
    return Problem(messages=list(messages), entry=entry)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
