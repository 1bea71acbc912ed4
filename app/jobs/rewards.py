"""Which part of an answer is graded, and rewards of the user's own."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from app.jobs.own_code import imported

# (one line of the prompt file, or reasoning-gym's entry; the graded part of the answer) -> the reward
Reward = Callable[[Mapping[str, Any], str], float]
Extractor = Callable[[str], str]

# In "-2" the minus is a sign; in "5 - 3" and "7-8" it is not.
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def whole(text: str) -> str:
    """The answer without surrounding whitespace."""
    return text.strip()


def last_number(text: str) -> str:
    """The last number of the answer, as is usual for arithmetic: "6 + 2 = 8." is graded as "8"."""
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


def first_line(text: str) -> str:
    """The text before the first line break."""
    return text.strip().partition("\n")[0].strip()


class Extraction(StrEnum):
    """The part of an answer that is graded."""

    LAST_NUMBER = "last-number"
    WHOLE = "whole"
    FIRST_LINE = "first-line"


EXTRACTORS: dict[Extraction, Extractor] = {
    Extraction.LAST_NUMBER: last_number,
    Extraction.WHOLE: whole,
    Extraction.FIRST_LINE: first_line,
}


def load_reward(path: str) -> Reward:
    """A reward by its import path, `package.module:function`; called as `function(entry, answer)`.

    Raises:
        ValueError: no such module or function, or one that cannot be called with two arguments.
    """
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
