import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from app.jobs.options import JobOptions
from deployments.protocol.responses import TakenGroup, TakenRollout
from trainers.advantages import OF_BATCHES, batch_advantages, has_signal, overlong_penalty
from trainers.estimators import AdvantageEstimator
from trainers.trajectory import Trajectory

MAX_TEXT = 80_000  # characters, of up to 12 each in JSON: the ledger takes 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An attempt at a problem, and its reward.

    Attributes:
        id: in the fleet's ledger, if it was captured.
        cut: whether an answer ended at `max_tokens`.
        penalty: added to the reward before advantages.
        trajectories: without advantages; empty before it is taken.
    """

    id: str = ""
    reward: float
    text: str
    tokens: int = 0
    cut: bool = False
    turns: int = 1
    source: str = ""
    penalty: float = 0.0
    trajectories: Sequence[Trajectory] = ()

    def settled(self) -> dict[str, Any]:
        """For `calls.settle_groups`."""
        info = json.dumps({"text": self.text[:MAX_TEXT], "source": self.source})
        return {"id": self.id, "reward": self.reward, "info": info}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    number: int
    rollouts: Sequence[Rollout]

    @property
    def oldest_version(self) -> int | None:
        """None: a teacher has sampled it."""
        return min(
            (
                span.version
                for rollout in self.rollouts
                for trajectory in rollout.trajectories
                for span in trajectory.weight_versions
            ),
            default=None,
        )

    @property
    def shaped_rewards(self) -> list[float]:
        return [rollout.reward + rollout.penalty for rollout in self.rollouts]

    @property
    def has_signal(self) -> bool:
        return has_signal(self.shaped_rewards)


def images_of(taken: Sequence[TakenGroup]) -> list[str]:
    sequences = (each for group in taken for rollout in group.rollouts for each in rollout.sequences)
    return list(dict.fromkeys(digest for sequence in sequences for digest in sequence.get("images", ())))


def group_of(taken: TakenGroup, options: JobOptions, images: Mapping[str, bytes]) -> Group:
    number = int(taken.group.rpartition(".")[2])
    return Group(number=number, rollouts=[_rollout(each, options, images) for each in taken.rollouts])


def _rollout(taken: TakenRollout, options: JobOptions, images: Mapping[str, bytes]) -> Rollout:
    trajectories = [_trajectory(each, images) for each in taken.sequences]
    turns = {turn["turn"]: turn for each in taken.sequences for turn in each["turns"]}
    assert isinstance(taken.reward, float), "the job rewards whole rollouts"
    made = Rollout(
        id=taken.id,
        reward=taken.reward,
        tokens=sum(trajectory.learned_tokens for trajectory in trajectories),
        cut=any(turn["finish_reason"] == "length" for turn in turns.values()),
        turns=len(turns),
        trajectories=trajectories,
        **json.loads(taken.info),
    )
    return penalised(made, options)


def _trajectory(sequence: Mapping[str, Any], images: Mapping[str, bytes]) -> Trajectory:
    fields = {name: value for name, value in sequence.items() if name != "turns"}
    constrained = fields["constrained"] if any(fields["constrained"]) else None
    files = [images[digest] for digest in fields.pop("images", ())]
    return Trajectory.from_json({**fields, "constrained": constrained, "advantage": 0.0, "images": files})


def penalised(rollout: Rollout, options: JobOptions) -> Rollout:
    if options.overlong_buffer == 0:
        return rollout
    longest = options.longest
    penalty = overlong_penalty(
        min(rollout.tokens, longest), max_tokens=longest, buffer_tokens=options.overlong_buffer
    )
    return replace(rollout, penalty=penalty)


def figures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
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


def learned(
    groups: Sequence[Group], estimator: AdvantageEstimator, *, has_teacher: bool = False
) -> list[tuple[Group, list[float]]]:
    """With their rollouts' advantages. Groups of equal rewards are left out, unless advantages are relative
    to the batch or there is a teacher."""
    advantages = batch_advantages([group.shaped_rewards for group in groups], estimator)
    whole = has_teacher or (estimator in OF_BATCHES and any(any(of_group) for of_group in advantages))
    return [each for each in zip(groups, advantages, strict=True) if whole or any(each[1])]


def trajectories(
    groups: Sequence[Group], estimator: AdvantageEstimator, *, has_teacher: bool = False
) -> list[Trajectory]:
    """The trainer's batch."""
    return [
        replace(trajectory, advantage=advantage)
        for group, of_group in learned(groups, estimator, has_teacher=has_teacher)
        for rollout, advantage in zip(group.rollouts, of_group, strict=True)
        for trajectory in rollout.trajectories
    ]
