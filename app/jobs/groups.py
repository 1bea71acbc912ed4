"""Groups of answers on their way from the fleet to the trainer, and how old they may be.

    producers ── put (waits while full) ──► GroupQueue ── take (drops stale groups) ──► trainer

Generation continues while the trainer works. The queue's capacity bounds how far it runs ahead, and
`max_staleness` how stale a batch can be.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.client.completions import Answer
from trainers.advantages import AdvantageEstimator, group_advantages
from trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Answers to one prompt, and their rewards."""

    number: int  # of the problem
    prompt_token_ids: Sequence[int]
    answers: Sequence[Answer]
    rewards: Sequence[float]

    @property
    def oldest_version(self) -> int:
        """Of the weights behind any of its tokens."""
        return min(answer.oldest_version for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    def trajectories(self, estimator: AdvantageEstimator) -> list[Trajectory]:
        """What the trainer learns from; empty if all rewards are equal, for then it can learn nothing."""
        advantages = group_advantages(self.rewards, estimator)
        if not any(advantages):
            return []
        return [
            answer.trajectory(self.prompt_token_ids, advantage)
            for answer, advantage in zip(self.answers, advantages, strict=True)
        ]


@dataclass
class GroupQueue:
    """A bounded queue of groups: one trainer takes, any number of producers put.

    Args:
        capacity: groups in the queue; a producer waits while it is full.
        max_staleness: a group is dropped when its oldest token is more than this many versions behind the
            current one. The importance weights correct younger ones.
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
        """Append a group; waits while the queue is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self.capacity)
            self._waiting.append(group)
            self._changed.notify_all()

    async def take(self, count: int, version: int) -> list[Group]:
        """The `count` oldest groups that are fresh enough for `version`; waits until there are that many.

        Raises:
            ValueError: the queue never holds that many.
        """
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
