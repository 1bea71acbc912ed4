"""Rollouts from the fleet to the trainer, and their staleness.

producers ── put (waits while full) ──► GroupQueue ── take (drops stale groups) ──► learner
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from trainers.advantages import OF_BATCHES, batch_advantages, has_signal
from trainers.estimators import AdvantageEstimator
from trainers.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An attempt at a problem, and its reward.

    Attributes:
        trajectories: without advantages, which come with the batch.
        penalty: added to the reward before advantages.
        text: for logs.
        cut: whether an answer ended at `max_tokens`.
        source: the data set or environment.
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
        """Sampled tokens."""
        return sum(trajectory.learned_tokens for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    number: int
    rollouts: Sequence[Rollout]

    @property
    def oldest_version(self) -> int:
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
    def shaped_rewards(self) -> list[float]:
        return [rollout.reward + rollout.penalty for rollout in self.rollouts]

    @property
    def has_signal(self) -> bool:
        return has_signal(self.shaped_rewards)


def figures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Fields that records of steps and evaluations share."""
    rewards = [rollout.reward for rollout in rollouts]
    by_source: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.source:
            by_source.setdefault(rollout.source, []).append(rollout.reward)
    return {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        "reward_by_source": {source: fmean(found) for source, found in sorted(by_source.items())},
        "cut_fraction": fmean(rollout.cut for rollout in rollouts),
        "answer_tokens_mean": fmean(rollout.tokens for rollout in rollouts),
    }


def trajectories(groups: Sequence[Group], estimator: AdvantageEstimator) -> list[Trajectory]:
    """The trainer's batch, without groups of equal rewards, unless advantages are relative to the batch."""
    advantages = batch_advantages([group.shaped_rewards for group in groups], estimator)
    whole = estimator in OF_BATCHES and any(any(of_group) for of_group in advantages)
    return [
        replace(trajectory, advantage=advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        if whole or any(of_group)
        for rollout, advantage in zip(group.rollouts, of_group, strict=True)
        for trajectory in rollout.trajectories
    ]


class GroupQueue:
    """A bounded queue with one consumer.

    Args:
        capacity: in groups; a producer waits while it is full.
        max_staleness: a group is dropped when its oldest token is more versions behind.
    """

    def __init__(self, capacity: int, max_staleness: int) -> None:
        self.dropped: list[int] = []  # problem numbers; the learner empties it
        self._max_staleness = max_staleness
        self._waiting: asyncio.Queue[Group] = asyncio.Queue(capacity)
        self._taken: list[Group] = []

    def __len__(self) -> int:
        return len(self._taken) + self._waiting.qsize()

    async def put(self, group: Group) -> None:
        await self._waiting.put(group)

    async def take(self, count: int, version: int) -> list[Group]:
        """The `count` oldest groups that are fresh enough for `version`; waits for them."""
        while len(self._taken) < count:
            group = await self._waiting.get()
            if version - group.oldest_version <= self._max_staleness:
                self._taken.append(group)
            else:
                self.dropped.append(group.number)
        taken, self._taken = self._taken, []
        return taken
