"""What a policy learns with each of the losses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainers import tiny
from tests.trainers.learning import ANSWERS, PROMPT, on_policy, with_changes
from trainers.learner import Learner
from trainers.settings import DEFAULTS, LossConfig
from trainers.trained_policy import TrainedPolicy


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_loss_makes_what_it_should_likelier(tmp_path: Path, name: str) -> None:
    policy = tiny.policy(tmp_path)
    before = {t.token_ids: sum(t.logprobs) for t in on_policy(policy, ANSWERS)}
    metrics = Learner(policy, with_changes(loss=LossConfig(name=name))).step(on_policy(policy, ANSWERS))
    after = {t.token_ids: sum(t.logprobs) for t in on_policy(policy, ANSWERS)}
    assert after[(6, 7, 1)] > before[(6, 7, 1)] and metrics["skipped"] is False
    assert (after[(8, 1)] > before[(8, 1)]) == (name == "sft"), "it imitates the bad answer too"
    assert ("importance_mean" in metrics) == (name != "sft")


def test_sfts_loss_is_transformers_own(tmp_path: Path) -> None:
    policy, other = tiny.policy(tmp_path), TrainedPolicy.load(tmp_path)
    batch = [
        replace(each, loss_mask=(True, *(False, True)[: len(each.token_ids) - 1]))
        for each in (on_policy(policy, ANSWERS))
    ]
    longest = max(map(len, batch))
    ids, labels = torch.zeros(2, len(batch), longest, dtype=torch.int64)
    labels.fill_(-100)
    for row, each in enumerate(batch):
        ids[row, : len(each)] = torch.tensor(each.prompt_token_ids + each.token_ids)
        learned = torch.tensor((False,) * len(PROMPT) + (each.loss_mask or ()))
        labels[row, : len(each)][learned] = ids[row, : len(each)][learned]
    loss = other.model(input_ids=ids, labels=labels).loss
    loss.backward()
    gradients = [p.grad for p in other.model.parameters() if p.grad is not None]
    metrics = Learner(policy, with_changes(loss=LossConfig(name="sft"))).step(batch)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)
