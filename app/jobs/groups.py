"""Groups of answers on their way from the fleet to the trainer, and how old they may be.

    producers ── put (waits while full) ──► GroupQueue ── take (drops what is too old) ──► trainer

Generation goes on while the trainer works; what bounds how far it runs ahead is the queue's
capacity, and what bounds how stale a batch can be is `max_staleness`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainers.advantages import AdvantageEstimator, group_advantages
from trainers.trajectory import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    weight_versions: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Answers to one prompt, and their rewards."""

    number: int  # of the problem
    prompt_token_ids: tuple[int, ...]
    answers: Sequence[Answer]
    rewards: Sequence[float]

    @property
    def oldest_version(self) -> int:
        """Of the weights that made any of its tokens."""
        return min(span.version for answer in self.answers for span in answer.weight_versions)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def trajectories(self, estimator: AdvantageEstimator) -> list[dict[str, object]]:
        """What the trainer takes; nothing if all rewards are equal, since then there is nothing to learn."""
        advantages = group_advantages(self.rewards, estimator)
        if not any(advantages):
            return []
        return [
            {
                "prompt_token_ids": list(self.prompt_token_ids),
                "token_ids": list(answer.token_ids),
                "logprobs": list(answer.logprobs),
                "advantage": advantage,
                "weight_versions": [
                    {"version": span.version, "start": span.start, "end": span.end}
                    for span in answer.weight_versions
                ],
            }
            for answer, advantage in zip(self.answers, advantages, strict=True)
        ]


@dataclass
class GroupQueue:
    """One trainer takes, any number of producers put.

    Args:
        capacity: groups that wait; a producer that finds it full waits.
        max_staleness: a group is dropped when its oldest token is from a version more than this
            many behind the current one. The importance weights correct what is younger.
    """

    capacity: int
    max_staleness: int
    dropped: int = 0
    _waiting: deque[Group] = field(default_factory=deque)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.max_staleness < 0:
            raise ValueError(
                "a queue needs capacity of at least 1 and max_staleness of at least 0, "
                f"got {self.capacity} and {self.max_staleness}"
            )

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, group: Group) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self.capacity)
            self._waiting.append(group)
            self._changed.notify_all()

    async def take(self, count: int, version: int) -> list[Group]:
        """The `count` oldest groups that are fresh enough for `version`; waits until there are so many."""
        if count > self.capacity:
            raise ValueError(f"a queue of {self.capacity} groups never holds {count}")
        async with self._changed:
            while True:
                self._drop_stale(version)
                if len(self._waiting) >= count:
                    break
                await self._changed.wait()
            taken = [self._waiting.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def _drop_stale(self, version: int) -> None:
        fresh = [group for group in self._waiting if version - group.oldest_version <= self.max_staleness]
        if len(fresh) < len(self._waiting):
            self.dropped += len(self._waiting) - len(fresh)
            self._waiting = deque(fresh)
            self._changed.notify_all()
