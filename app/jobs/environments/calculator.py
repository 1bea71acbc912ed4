"""An example with a tool: sums too large for the model, and a calculator. The model writes a sum and reads
its result; its second turn is rewarded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from app.jobs.environments.environment import Reply
from app.jobs.environments.transcript import Message
from app.jobs.options import Extraction

_SUM = re.compile(r"\d+(?: ?[+-] ?\d+)+")


@dataclass
class CalculatorConversation:
    messages: Sequence[Message]
    expected: int
    _calculated: bool = False

    async def reply(self, answer: str) -> Reply:
        if self._calculated:
            is_right = Extraction.LAST_NUMBER.of(answer) == str(self.expected)
            return Reply(reward=float(is_right), done=True)
        self._calculated = True
        told = {"role": "user", "content": f"Calculator: {calculated(answer)}. What is the answer?"}
        return Reply(messages=[told])


@dataclass(frozen=True)
class Calculator:
    """Sums of two numbers of `digits` digits."""

    digits: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 12:
            raise ValueError(f"digits must lie in [1, 12], got {self.digits}")

    def start(self, number: int) -> CalculatorConversation:
        draw = Random(f"{self.seed} {number}")
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        a, b = draw.randint(low, high), draw.randint(low, high)
        question = f"What is {a} + {b}? Write the sum for the calculator."
        return CalculatorConversation(messages=[{"role": "user", "content": question}], expected=a + b)


def calculated(text: str) -> str:
    found = _SUM.findall(text)
    if not found:
        return "no sum was given"
    written = found[-1].replace(" ", "")
    return f"{written} = {sum(int(term) for term in re.findall(r'[+-]?[0-9]+', written))}"
