"""Rollouts on their way from the fleet to the trainer, and how stale they may be.

producers ── put (waits while full) ──► GroupQueue ── take (drops stale groups) ──► learner
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainers.advantages import OF_BATCHES, batch_advantages, has_signal
from trainers.settings import AdvantageEstimator
from trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the model said about a problem, over one turn or more, and its reward.

    Attributes:
        trajectories: their advantages come with the batch.
        penalty: added to the reward before advantages, 0.0 or less; see `overlong_penalty`.
        text: for logs.
        cut: whether an answer ended at `max_tokens`.
        source: the data set or environment that the problem is from, for figures by it.
    """

    trajectories: Sequence[Trajectory]
    reward: float
    text: str
    penalty: float = 0.0
    cut: bool = False
    turns: int = 1
    source: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens the model sampled."""
        return sum(trajectory.learned_tokens for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one problem."""

    number: int  # the problem's
    rollouts: Sequence[Rollout]

    @property
    def oldest_version(self) -> int:
        """The oldest weights behind any of its tokens."""
        return min(
            span.version
            for rollout in self.rollouts
            for trajectory in rollout.trajectories
            for span in trajectory.weight_versions
        )

    @property
    def tokens(self) -> int:
        return sum(rollout.tokens for rollout in self.rollouts)

    @property
    def mean_reward(self) -> float:
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)

    @property
    def shaped_rewards(self) -> list[float]:
        return [rollout.reward + rollout.penalty for rollout in self.rollouts]

    @property
    def has_signal(self) -> bool:
        return has_signal(self.shaped_rewards)


def reward_by_source(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean reward of each source that has a name."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.source:
            rewards.setdefault(rollout.source, []).append(rollout.reward)
    return {source: sum(found) / len(found) for source, found in sorted(rewards.items())}


def trajectories(groups: Sequence[Group], estimator: AdvantageEstimator) -> list[Trajectory]:
    """The batch that the trainer learns from; groups with equal rewards are left out.

    Where advantages are relative to the whole batch, all groups are in it, unless all rewards are equal.
    """
    advantages = batch_advantages([group.shaped_rewards for group in groups], estimator)
    whole = estimator in OF_BATCHES and any(any(of_group) for of_group in advantages)
    return [
        replace(trajectory, advantage=advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        if whole or any(of_group)
        for rollout, advantage in zip(group.rollouts, of_group, strict=True)
        for trajectory in rollout.trajectories
    ]


@dataclass
class GroupQueue:
    """A bounded queue with one consumer and any number of producers.

    Args:
        capacity: in groups; a producer waits while it is full.
        max_staleness: a group is dropped when its oldest token is more than this many versions behind.
    """

    capacity: int
    max_staleness: int
    dropped: list[int] = field(default_factory=list)  # problem numbers; the learner empties it
    _waiting: deque[Group] = field(default_factory=deque)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, group: Group) -> None:
        """Append a group; waits while the queue is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self.capacity)
            self._waiting.append(group)
            self._changed.notify_all()

    async def take(self, count: int, version: int) -> list[Group]:
        """The `count` oldest groups that are fresh enough for `version`; waits until there are that many."""
        assert count <= self.capacity, "the queue never holds that many"
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
