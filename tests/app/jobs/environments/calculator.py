"""An environment with a tool: the model writes a sum and reads its result; its second turn is rewarded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.jobs.environments.environment import Message, Reply

_SUM = re.compile(r"(\d+) ?\+ ?(\d+)")


@dataclass
class CalculatorConversation:
    messages: Sequence[Message]
    expected: str
    _calculated: bool = False

    async def reply(self, answer: str) -> Reply:
        if self._calculated:
            return Reply(reward=float(answer.strip() == self.expected), done=True)
        self._calculated = True
        found = _SUM.search(answer)
        result = "no sum was given" if found is None else str(int(found[1]) + int(found[2]))
        return Reply(messages=[{"role": "user", "content": f"Calculator: {result}. What is the answer?"}])


@dataclass(frozen=True)
class Calculator:
    digits: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 12:
            raise ValueError(f"digits must lie in [1, 12], got {self.digits}")

    def start(self, number: int) -> CalculatorConversation:
        a, b = 10**self.digits - 1 - number, number
        question = [{"role": "user", "content": f"What is {a} + {b}?"}]
        return CalculatorConversation(messages=question, expected=str(a + b))
