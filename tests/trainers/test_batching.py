from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainers.tiny import trajectory
from trainers.batching import collate, plan_micro_batches, share_of_rank
from trainers.trajectory import Trajectory, VersionSpan

CPU = torch.device("cpu")
BATCHES = st.lists(
    st.builds(
        trajectory,
        st.sampled_from([(5,), (6, 7), (8, 9, 10, 11, 12, 13)]),
        st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple),
    ),
    min_size=1,
    max_size=20,
)


def test_one_completion_per_row_is_the_plain_layout() -> None:
    batch = collate(
        [trajectory((5, 6), (7,), logprobs=(-0.5,)), trajectory((8,), (9, 10), advantage=2.0)],
        [(0,), (1,)],
        pad_token_id=0,
        device=CPU,
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 0], [0, 8, 9, 10]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch.predictors.tolist() == [1, 4 + 1, 4 + 2]
    assert batch.targets.tolist() == [7, 9, 10]
    assert batch.completions.tolist() == [0, 1, 1] and batch.lengths.tolist() == [1, 2]
    assert batch.rollout_logprobs.tolist() == [-0.5, -1.0, -1.0]
    assert batch.advantages.tolist() == [1.0, 2.0, 2.0]
    assert batch.versions.tolist() == [-1, -1, -1]


def test_answers_in_one_row_attend_to_the_prompt_and_themselves() -> None:
    batch = collate(
        [trajectory((5, 6), (7, 8), advantage=1.0), trajectory((5, 6), (9,), advantage=-1.0)],
        [(0, 1)],
        pad_token_id=0,
        device=CPU,
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert batch.predictors.tolist() == [1, 2, 1]
    assert batch.targets.tolist() == [7, 8, 9]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0]
    assert batch.attention_mask[0, 0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


@pytest.mark.slow
@settings(deadline=None)  # other processes share the cores
@given(BATCHES, st.integers(1, 100), st.booleans())
def test_every_trajectory_is_planned_once_and_budgets_hold(
    batch: list[Trajectory], budget: int, share: bool
) -> None:
    plan = plan_micro_batches(batch, token_budget=budget, share_prompts=share)
    assert Counter(i for rows in plan for row in rows for i in row) == Counter(range(len(batch)))
    for rows in plan:
        assert all(len({batch[i].prompt_token_ids for i in row}) == 1 for row in rows)
        if sum(map(len, rows)) > 1:
            assert collate(batch, rows, pad_token_id=0, device=CPU).input_ids.numel() <= budget


@pytest.mark.slow
@settings(deadline=None)  # other processes share the cores
@given(BATCHES, st.booleans())
def test_collating_loses_no_token(batch: list[Trajectory], share: bool) -> None:
    (rows,) = plan_micro_batches(batch, token_budget=10**6, share_prompts=share)
    tensors = collate(batch, rows, pad_token_id=0, device=CPU)
    order = [index for row in rows for index in row]
    assert tensors.lengths.tolist() == [len(batch[index].token_ids) for index in order]
    for answer, index in enumerate(order):
        mine = tensors.completions == answer
        assert tuple(tensors.targets[mine].tolist()) == batch[index].token_ids
        before = (batch[index].prompt_token_ids + batch[index].token_ids)[
            len(batch[index].prompt_token_ids) - 1 : -1
        ]
        assert tuple(tensors.input_ids.flatten()[tensors.predictors[mine]].tolist()) == before


def test_each_token_has_the_version_of_its_span() -> None:
    spans = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=2, end=3))
    answer = replace(trajectory((5, 6), (7, 8, 9)), weight_versions=spans)
    assert collate([answer], [(0,)], pad_token_id=0, device=CPU).versions.tolist() == [4, -1, 5]


def test_masked_tokens_are_read_and_not_learned() -> None:
    spans = (VersionSpan(version=4, start=0, end=3),)
    answers = [
        replace(
            trajectory((5, 6), (7, 8, 9)),
            loss_mask=(True, False, True),
            constrained=(False, True, True),
            weight_versions=spans,
        ),
        replace(trajectory((5, 6), (10,)), loss_mask=(False,)),
        replace(trajectory((5, 6), (11, 12)), advantage=(0.5, -0.5), logprobs=(-0.25, -0.75)),
    ]
    for rows in ([(0,), (1,), (2,)], [(0, 1, 2)]):
        batch = collate(answers, rows, pad_token_id=0, device=CPU)
        assert batch.input_ids[batch.input_ids > 6].tolist() == [7, 8, 9, 10, 11, 12]
        assert batch.targets.tolist() == [7, 9, 11, 12]
        assert batch.input_ids.flatten()[batch.predictors].tolist() == [6, 8, 6, 11]
        assert batch.completions.tolist() == [0, 0, 2, 2] and batch.lengths.tolist() == [2, 0, 2]
        assert batch.advantages.tolist() == [1.0, 1.0, 0.5, -0.5]
        assert batch.rollout_logprobs.tolist() == [-1.0, -1.0, -0.25, -0.75]
        assert batch.versions.tolist() == [4, 4, -1, -1]
        assert batch.constrained.tolist() == [False, True, False, False]


@settings(deadline=None)  # other processes share the cores
@given(st.integers(1, 9), st.integers(1, 4))
def test_every_rank_runs_as_many_micro_batches_as_every_other(count: int, world_size: int) -> None:
    plan = [[(i,)] for i in range(count)]
    shares = [share_of_rank(plan, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    counted = [rows for share in shares for rows, counts in share if counts]
    assert sorted(counted) == sorted(plan)
