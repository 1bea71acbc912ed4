import pytest

from app.http.requests import SettledRollout
from app.jobs.groups import Group, Rollout, group_of, images_of, trajectories
from app.jobs.options import JobOptions
from deployments.protocol.responses import TakenGroup, TakenRollout
from trainers.estimators import AdvantageEstimator
from trainers.trajectory import Trajectory, VersionSpan, problems


def group(number: int, *versions: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    spans = [VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]
    tokens = len(versions)
    trajectory = Trajectory(
        prompt_token_ids=(1, 2),
        token_ids=(3,) * tokens,
        logprobs=(-1.0,) * tokens,
        advantage=0.0,
        weight_versions=tuple(spans),
    )
    made = [Rollout(trajectories=[trajectory], reward=reward, text="") for reward in rewards]
    return Group(number=number, rollouts=made)


def test_the_ledger_takes_a_rollout_with_any_text() -> None:
    settled = Rollout(id="a", reward=1.0, text="\U0001f600" * 200_000).settled()
    assert SettledRollout.model_validate(settled).info == settled["info"]


def test_a_group_of_the_ledger_has_its_tokens_and_figures() -> None:
    def turn(number: int, reason: str) -> dict[str, object]:
        return {"turn": number, "start": 0, "end": 1, "finish_reason": reason}

    sequence = {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4, 5],
        "logprobs": [-1.0, 0.0, -1.0],
        "loss_mask": [True, False, True],
        "constrained": [False, False, False],
        "weight_versions": [{"version": 7, "start": 0, "end": 1}, {"version": 6, "start": 2, "end": 3}],
        "turns": [turn(0, "stop"), turn(1, "length")],
    }
    forked = {
        **sequence,
        "images": ["d1", "d2"],
        "loss_mask": [False, False, True],
        "constrained": [False, False, True],
    }
    forked["turns"] = [turn(0, "stop"), turn(2, "stop")]
    info = '{"text": "said", "source": "sums"}'
    taken = TakenRollout(id="r.4.a", reward=0.5, info=info, sequences=[sequence, forked])
    options = JobOptions(overlong_buffer=16, max_tokens=16)
    groups = [TakenGroup(group="r.4", rollouts=[taken, taken])]
    assert images_of(groups) == ["d1", "d2"]
    groups = [TakenGroup(group="r.4", rollouts=[taken])]
    made = group_of(*groups, options, {"d1": b"one", "d2": b"two"})
    (rollout,) = made.rollouts
    assert (made.number, made.oldest_version) == (4, 6)
    assert (rollout.id, rollout.reward, rollout.text, rollout.source) == ("r.4.a", 0.5, "said", "sums")
    assert (rollout.tokens, rollout.turns, rollout.cut) == (3, 3, True)
    assert rollout.penalty == -3 / 16
    first, second = rollout.trajectories
    assert first.images == () and second.images == (b"one", b"two")
    assert first.constrained is None and second.constrained == (False, False, True)
    assert first.weight_versions[1] == VersionSpan(version=6, start=2, end=3)
    assert all(problems(each, vocabulary_size=10, max_length=10) == [] for each in rollout.trajectories)


def test_trajectories_carry_the_spans_and_satisfy_the_trainer() -> None:
    made = trajectories([group(0, 4, 5)], AdvantageEstimator.DR_GRPO)
    assert [trajectory.advantage for trajectory in made] == [-0.5, 0.5]
    assert all(problems(each, vocabulary_size=10, max_length=10) == [] for each in made)
    assert made[0].weight_versions == (
        VersionSpan(version=4, start=0, end=1),
        VersionSpan(version=5, start=1, end=2),
    )


def test_the_trainer_learns_nothing_from_equal_rewards() -> None:
    groups = [group(0, 1, rewards=(1.0, 1.0)), group(1, 1)]
    assert len(trajectories(groups, AdvantageEstimator.GRPO)) == 2


def test_over_the_whole_batch_a_group_of_equal_rewards_is_compared_with_the_others() -> None:
    groups = [group(0, 1, rewards=(1.0, 1.0)), group(1, 1, rewards=(0.0, 0.0))]
    advantages = [made.advantage for made in trajectories(groups, AdvantageEstimator.REINFORCE_PP)]
    assert advantages == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=0.01)
    same = [group(0, 1, rewards=(1.0, 1.0)), group(1, 1, rewards=(1.0, 1.0))]
    assert trajectories(same, AdvantageEstimator.REINFORCE_PP) == []
