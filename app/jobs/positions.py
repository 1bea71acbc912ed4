"""Which problems a run has consumed, so that a resumed one continues with exactly the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Positions:
    """The numbers of problems: handed out in order, consumed in any order.

    A problem is consumed when the trainer has learned from its answers, or when these were dropped. What was
    handed out and not consumed when a job ended is handed out again to the next.

    Args:
        next_problem: every problem before it is consumed.
        ahead: consumed ones after it.
    """

    next_problem: int = 0
    ahead: set[int] = field(default_factory=set)
    _handed_out: int = -1

    def __post_init__(self) -> None:
        self._handed_out = self.next_problem - 1

    def hand_out(self) -> int:
        """The next problem that is neither consumed nor in flight."""
        self._handed_out += 1
        while self._handed_out in self.ahead:
            self._handed_out += 1
        return self._handed_out

    def consume(self, numbers: Iterable[int]) -> None:
        """These are not handed out again."""
        self.ahead.update(number for number in numbers if number >= self.next_problem)
        while self.next_problem in self.ahead:
            self.ahead.remove(self.next_problem)
            self.next_problem += 1
