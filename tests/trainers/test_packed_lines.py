from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers import MistralConfig, MistralForCausalLM

from tests.trainers import tiny
from tests.trainers.test_batching import BATCHES
from tests.trainers.test_trained_policy import ANSWERS, alone
from trainers.batching import TokenBatch, collate, plan_micro_batches
from trainers.learner import Learner
from trainers.packed_lines import line_length, pack, plan_lines
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

CPU = torch.device("cpu")


def packed(answers: list[Trajectory], rows: list[tuple[int, ...]], budget: int = 128) -> TokenBatch:
    return pack(answers, rows, token_budget=budget, pad_token_id=0, device=CPU)


def dense(batch: TokenBatch) -> torch.Tensor:
    """The same mask for attention that has a backward pass on CPUs: bool [1, 1, L, L]."""
    mask, length = batch.attention_mask, batch.input_ids.shape[1]
    assert isinstance(mask, BlockMask)
    return create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")


def blocks(mask: BlockMask) -> list[torch.Tensor]:
    """Its lists of blocks, by query and by key, partial and full ones."""
    parts = mask.as_tuple()
    assert sum(isinstance(part, torch.Tensor) for part in parts) == 8
    return [part for part in parts if isinstance(part, torch.Tensor)]


def test_a_prompt_stands_once_before_its_answers() -> None:
    answers = [tiny.trajectory((5, 6), (7, 8)), tiny.trajectory((9,), (10,)), tiny.trajectory((5, 6), (11,))]
    batch = packed(answers, [(0, 2), (1,)])
    assert batch.input_ids.shape == (1, 128)
    assert batch.input_ids[0, :8].tolist() == [5, 6, 7, 8, 11, 9, 10, 0]
    assert batch.position_ids[0, :8].tolist() == [0, 1, 2, 3, 2, 0, 1, 0]
    assert batch.predictors.tolist() == [1, 2, 1, 5]
    assert batch.targets.tolist() == [7, 8, 11, 10]
    assert batch.completions.tolist() == [0, 0, 1, 2]
    assert dense(batch)[0, 0, :9, :9].long().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.slow
@settings(deadline=None)  # other processes share the cores
@given(BATCHES, st.integers(1, 100))
def test_every_trajectory_is_planned_once_and_budgets_hold(batch: list[Trajectory], budget: int) -> None:
    plan = plan_lines(batch, token_budget=budget)
    assert Counter(i for rows in plan for row in rows for i in row) == Counter(range(len(batch)))
    for rows in plan:
        assert all(len({batch[i].prompt_token_ids for i in row}) == 1 for row in rows)
        prompts = sum(len(batch[row[0]].prompt_token_ids) for row in rows)
        tokens = prompts + sum(len(batch[i].token_ids) for row in rows for i in row)
        assert tokens <= budget or sum(map(len, rows)) == 1
        assert 0 <= line_length(tokens, token_budget=budget) - tokens < max(128, budget / 8 + 128)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 300), min_size=1)), min_size=1))
def test_the_blocks_of_a_line_are_those_that_torch_finds(groups: list[tuple[int, list[int]]]) -> None:
    answers = [
        tiny.trajectory((3 + number,) * prompt, (2,) * length)
        for number, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]
    for rows in plan_lines(answers, token_budget=1500):
        mask = packed(answers, rows, budget=1500).attention_mask
        assert isinstance(mask, BlockMask)
        length = mask.seq_lengths[0]
        expected = create_block_mask(mask.mask_mod, 1, None, length, length, device="cpu")
        for left, right in zip(blocks(mask), blocks(expected), strict=True):
            assert left.dtype == right.dtype and torch.equal(left, right)


def test_a_long_prompt_is_repeated_only_for_completions_that_are_longer() -> None:
    answers = [tiny.trajectory((3,) * 50, (4,) * length) for length in (20, 20, 20)]
    answers.append(tiny.trajectory((5,), (6,) * 20))
    assert plan_lines(answers, token_budget=110) == [[(2, 1, 0)], [(3,)]]
    assert plan_lines(answers, token_budget=100) == [[(2, 1)], [(0,), (3,)]]


@pytest.mark.slow
@settings(deadline=None)  # other processes share the cores
@given(BATCHES)
def test_packing_learns_the_tokens_that_rows_learn(batch: list[Trajectory]) -> None:
    first = batch[0]
    batch[0] = replace(first, loss_mask=(False,) * (len(first.token_ids) - 1) + (True,))
    (rows,) = plan_lines(batch, token_budget=10**6)
    mine, plain = packed(batch, rows), collate(batch, rows, pad_token_id=0, device=CPU)
    for name in ("targets", "completions", "lengths", "rollout_logprobs", "advantages", "versions"):
        assert torch.equal(getattr(mine, name), getattr(plain, name)), name
    before = [each.input_ids.flatten()[each.predictors] for each in (mine, plain)]
    assert torch.equal(*before)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_line_gives_the_scores_and_gradients_of_each_completion_alone(tmp_path: Path, kind: str) -> None:
    policy = tiny.policy(tmp_path, kind)
    (rows,) = plan_lines(ANSWERS, token_budget=1000)
    batch = packed(ANSWERS, rows)
    scores = policy.scores(replace(batch, attention_mask=dense(batch)))
    expected = torch.cat([alone(policy, ANSWERS[index]) for row in rows for index in row])
    torch.testing.assert_close(scores.logprobs, expected, rtol=1e-4, atol=1e-4)
    parameters = policy.parameters()
    gradients = [torch.autograd.grad(of.sum(), parameters) for of in (scores.logprobs, expected)]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_flex_attention_reads_the_mask_as_it_is_meant(tmp_path: Path) -> None:
    rows_of = tiny.policy(tmp_path)
    policy = TrainedPolicy.load(tmp_path, packed=True)
    assert policy.is_packed and not rows_of.is_packed
    (rows,) = plan_lines(ANSWERS, token_budget=1000)
    # Not compiled: inductor of torch 2.13 writes C++ that does not compile where a mask reads tensors.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        scores = policy.scores(packed(ANSWERS, rows))
        expected = torch.cat([alone(rows_of, ANSWERS[index]) for row in rows for index in row])
    torch.testing.assert_close(scores.logprobs, expected, rtol=1e-4, atol=1e-4)


def test_a_window_is_not_lost_in_shared_or_packed_rows(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**tiny.SIZES, sliding_window=2)).save_pretrained(tmp_path)
    policy = TrainedPolicy.load(tmp_path)
    assert not policy.can_share_prompts, "a mask for each row replaces that of the window"
    (rows,) = plan_micro_batches(ANSWERS, token_budget=1000)
    scores = policy.scores(collate(ANSWERS, rows, pad_token_id=0, device=CPU))
    expected = torch.cat([alone(policy, ANSWERS[index]) for row in rows for index in row])
    torch.testing.assert_close(scores.logprobs, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="this one has a window"):
        TrainedPolicy.load(tmp_path, packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"activation_checkpointing": True},
        {"compile_layers": True},
        {"compile_layers": True, "activation_checkpointing": "selective"},
    ],
)
def test_on_a_gpu_packed_steps_are_those_of_rows(tmp_path: Path, kind: str, given: dict[str, Any]) -> None:
    tiny.save(tmp_path, kind, head_dim=16)  # the smallest that FlexAttention takes
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_microbatch=8)
    plain = Learner(TrainedPolicy.load(tmp_path, device="cuda"), config)
    lines = Learner(TrainedPolicy.load(tmp_path, device="cuda", packed=True, **given), config)
    for _ in range(3):
        expected, metrics = plain.step(ANSWERS), lines.step(ANSWERS)
        for name in ("loss", "entropy", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    for left, right in zip(plain.policy.parameters(), lines.policy.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3)
