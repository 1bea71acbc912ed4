"""Groups of attempts on their way from the fleet to the trainer, and how old they may be.

    producers ── put (waits while full) ──► GroupQueue ── take (drops stale groups) ──► trainer

Generation continues while the trainer works. The queue's capacity bounds how far it runs ahead, and
`max_staleness` how stale a batch can be.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.jobs.attempts import Attempt
from trainers.advantages import OF_BATCHES, AdvantageEstimator, batch_advantages, has_signal
from trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Attempts at one problem."""

    number: int  # of the problem
    attempts: Sequence[Attempt]

    @property
    def oldest_version(self) -> int:
        """Of the weights behind any of its tokens."""
        return min(sample.oldest_version for attempt in self.attempts for sample in attempt.samples)

    @property
    def tokens(self) -> int:
        """That the model said."""
        return sum(attempt.sampled_tokens for attempt in self.attempts)

    @property
    def mean_reward(self) -> float:
        return sum(attempt.reward for attempt in self.attempts) / len(self.attempts)

    @property
    def shaped_rewards(self) -> list[float]:
        """With what attempts lose for their length."""
        return [attempt.reward + attempt.penalty for attempt in self.attempts]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ; if not, there is nothing to learn but by comparison with others."""
        return has_signal(self.shaped_rewards)


def trajectories(groups: Sequence[Group], estimator: AdvantageEstimator) -> list[Trajectory]:
    """What the trainer learns from.

    Groups whose rewards are equal are left out, except where advantages are those of the whole batch; then
    the result is empty if all rewards of the batch are equal.

    Raises:
        ValueError: a reward is not finite.
    """
    advantages = batch_advantages([group.shaped_rewards for group in groups], estimator)
    whole = estimator in OF_BATCHES and any(any(group) for group in advantages)
    return [
        sample.trajectory(advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        if whole or any(of_group)
        for attempt, advantage in zip(group.attempts, of_group, strict=True)
        for sample in attempt.samples
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
    dropped: list[int] = field(default_factory=list)  # numbers of the problems
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
            numbers = {group.number for group in fresh}
            self.dropped += [group.number for group in self._waiting if group.number not in numbers]
            self._waiting = deque(fresh)
            self._changed.notify_all()
