"""What the backward pass computes again, and what it does not."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainers import tiny
from tests.trainers.test_trained_policy import ANSWERS
from trainers import output_head
from trainers.learner import Learner
from trainers.settings import Checkpointing, LearnerConfig, LoraConfig
from trainers.trained_policy import TrainedPolicy

CONFIG = LearnerConfig(max_tokens_per_microbatch=64)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(policy: TrainedPolicy) -> Counter[str]:
    learner = Learner(policy, CONFIG)
    with Operations() as counted:
        learner.step(ANSWERS)
    return counted.seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_selective_checkpointing_repeats_what_is_cheap(tmp_path: Path, kind: str) -> None:
    tiny.save(tmp_path, kind)
    settings: tuple[Checkpointing, ...] = (False, "selective", True)
    none, selective, full = (
        operations(TrainedPolicy.load(tmp_path, activation_checkpointing=each)) for each in settings
    )
    for product in ("mm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert selective[product] == none[product], product
    assert full["mm"] > none["mm"]
    for cheap in ("silu", "rsqrt"):
        assert selective[cheap] == full[cheap] > none[cheap], cheap


@pytest.mark.slow
@pytest.mark.timeout(400)  # it compiles
def test_compiled_layers_keep_less_within_a_budget(tmp_path: Path) -> None:
    tiny.save(tmp_path, "qwen3")
    kept, after = [], []
    settings: tuple[Checkpointing, ...] = (False, "selective")
    for setting in settings:
        torch._dynamo.reset()
        policy = TrainedPolicy.load(tmp_path, activation_checkpointing=setting, compile_layers=True)
        learner = Learner(policy, CONFIG)
        learner.step(ANSWERS)  # compiles
        kept.append(tiny.kept_by_a_step(learner, ANSWERS))
        after.append([tensor.detach().clone() for tensor in policy.trained().values()])
    for left, right in zip(*after, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.slow
def test_the_layers_of_an_adapter_are_compiled_once_with_gradients_and_once_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's input needs no gradient, by which torch would compile it apart from the others."""
    tiny.save(tmp_path, "qwen3")
    compiled = []

    def eager(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr("trainers.layers._within_budget", eager)
    monkeypatch.setattr("trainers.output_head._compiled", lambda: output_head._EAGER)
    torch._dynamo.reset()
    policy = TrainedPolicy.load(tmp_path, activation_checkpointing="selective", compile_layers=True)
    policy.adapt(LoraConfig(name="policy", rank=2), seed=0)
    learner = Learner(policy, LearnerConfig())  # one micro-batch: other shapes are compiled as well
    learner.step(ANSWERS)
    learner.step(ANSWERS)
    assert sorted(compiled) == [False, True]
