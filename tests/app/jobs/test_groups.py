import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.client.completions import Answer
from app.jobs.groups import Group, GroupQueue, Rollout, trajectories
from trainers.estimators import AdvantageEstimator
from trainers.trajectory import VersionSpan, problems


def group(number: int, *versions: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    spans = [VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]
    tokens = len(versions)
    answer = Answer(token_ids=[3] * tokens, logprobs=[-1.0] * tokens, text="", weight_versions=spans)
    trajectory = answer.trajectory((1, 2), advantage=0.0)
    made = [Rollout(trajectories=[trajectory], reward=reward, text="") for reward in rewards]
    return Group(number=number, rollouts=made)


async def test_a_producer_waits_while_the_queue_is_full() -> None:
    queue = GroupQueue(capacity=1, max_staleness=0)
    await queue.put(group(0, 1))
    second = asyncio.ensure_future(queue.put(group(1, 1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not second.done()
    await queue.take(1, version=1)
    await asyncio.wait_for(second, 5)
    assert len(queue) == 1


async def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    queue = GroupQueue(capacity=4, max_staleness=1)
    await queue.put(group(0, 3, 4, 5))  # began at version 3: two behind
    await queue.put(group(1, 4, 5))
    assert [g.number for g in await queue.take(1, version=5)] == [1]
    assert queue.dropped == [0]


async def test_a_dropped_group_makes_room_for_a_waiting_producer() -> None:
    queue = GroupQueue(capacity=1, max_staleness=0)
    await queue.put(group(0, 1))
    waiting = asyncio.ensure_future(queue.put(group(1, 2)))
    taken = await asyncio.wait_for(queue.take(1, version=2), 5)
    await waiting
    assert [g.number for g in taken] == [1] and queue.dropped == [0]


@settings(deadline=None)  # other processes share the cores
@given(
    st.lists(st.integers(0, 10), min_size=1, max_size=20),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_nothing_too_old_is_ever_taken_and_nothing_fresh_is_lost(
    versions: list[int], max_staleness: int, current: int
) -> None:
    versions = [*versions, current]  # the last one is fresh, so all are looked at

    async def run() -> None:
        queue = GroupQueue(capacity=21, max_staleness=max_staleness)
        for number, version in enumerate(versions):
            await queue.put(group(number, version))
        fresh = [n for n, v in enumerate(versions) if current - v <= max_staleness]
        taken = await queue.take(len(fresh), current)
        assert [g.number for g in taken] == fresh
        assert queue.dropped == [n for n in range(len(versions)) if n not in fresh]

    asyncio.run(run())


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


def test_a_penalty_changes_the_advantage_and_not_the_reward() -> None:
    one = group(0, 1, rewards=(1.0, 1.0))
    long = replace(one, rollouts=[one.rollouts[0], replace(one.rollouts[1], penalty=-0.5)])
    assert long.has_signal
    assert [t.advantage for t in trajectories([long], AdvantageEstimator.DR_GRPO)] == [0.25, -0.25]
