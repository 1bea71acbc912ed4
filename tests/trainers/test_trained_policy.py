from pathlib import Path

import pytest
import torch

from tests.trainers import tiny
from trainers.batching import collate, plan_micro_batches
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import Trajectory

ANSWERS = [
    tiny.trajectory((3, 4, 5), (6, 7)),
    tiny.trajectory((3, 4, 5), (8, 9, 10, 1)),
    tiny.trajectory((11,), (12, 13, 14)),
    tiny.trajectory((3, 4, 5), (15,)),
]


def alone(policy: TrainedPolicy, answer: Trajectory) -> torch.Tensor:
    """Log-probabilities of one answer, computed without padding."""
    ids = torch.tensor([answer.prompt_token_ids + answer.token_ids])
    logits = policy.model(input_ids=ids).logits[0].float()
    start = len(answer.prompt_token_ids)
    return torch.log_softmax(logits[start - 1 : -1], -1).gather(-1, ids[0, start:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.SEEING])
@pytest.mark.parametrize("share", [False, True])
def test_scores_of_a_padded_batch_equal_those_of_each_completion_alone(
    tmp_path: Path, kind: str, share: bool
) -> None:
    policy = tiny.policy(tmp_path, kind)
    assert policy.can_share_prompts
    (rows,) = plan_micro_batches(ANSWERS, token_budget=1000, share_prompts=share)
    batch = collate(ANSWERS, rows, pad_token_id=policy.pad_token_id, device=policy.device)
    scores = policy.scores(batch, with_entropies=True)
    assert scores.entropies is not None and not scores.entropies.requires_grad
    assert scores.entropies.shape == scores.logprobs.shape
    for answer, index in enumerate(index for row in rows for index in row):
        expected = alone(policy, ANSWERS[index])
        actual = scores.logprobs[batch.completions == answer]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.SEEING])
def test_weights_of_another_checkpoint_are_loaded_in_place(tmp_path: Path, kind: str) -> None:
    policy, other = tiny.policy(tmp_path / "a", kind), tiny.policy(tmp_path / "b", kind, seed=1)
    addresses = [p.data_ptr() for p in policy.model.parameters()]
    policy.load_weights(tmp_path / "b")
    assert [p.data_ptr() for p in policy.model.parameters()] == addresses
    for left, right in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_code_that_a_checkpoint_brings_is_run_only_if_asked_for(tmp_path: Path) -> None:
    directory = tmp_path / "with_code"
    directory.mkdir()
    (directory / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}'
    )
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        TrainedPolicy.load(directory)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Exception, match="Own"):  # the code runs, and has no such class
        TrainedPolicy.load(directory, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
