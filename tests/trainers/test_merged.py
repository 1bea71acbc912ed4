"""An adapter that is added to what a source yields: the sums are peft's own, under the model's names.

`test_fsdp2` has those of a sharded model."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny_models import save_tiny_llama
from tests.trainers import tiny
from trainers.settings import LoraConfig
from trainers.sources import ParameterSource
from trainers.trained_policy import TrainedPolicy


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "model", 1)


def adapted(
    directory: Path,
    *,
    modules: tuple[str, ...] | None = None,
    dtype: str = "float32",
) -> TrainedPolicy:
    policy = TrainedPolicy.load(directory, dtype=dtype)
    policy.adapt(LoraConfig(publish="merged", rank=4, alpha=6.0, target_modules=modules), seed=3)
    return policy


def train(policy: TrainedPolicy) -> None:
    """Some values for the half that begins with zeros."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def merged(policy: TrainedPolicy, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    source = ParameterSource(policy.model, adapter=policy.adapter, dtype=dtype)
    assert source.resident() is None
    yielded = {name: tensor.clone() for name, tensor in source}  # it may be the model's own memory
    specs = [(spec.name, spec.dtype, spec.shape) for spec in source.specs()]
    assert specs == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in yielded.items()]
    return yielded


@pytest.mark.parametrize("modules", [None, ("q_proj", "o_proj")])
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_the_sums_are_those_of_peft(tmp_path: Path, kind: str, modules: tuple[str, ...] | None) -> None:
    tiny.save(tmp_path / "model", kind)
    policy = adapted(tmp_path / "model", modules=modules)
    train(policy)
    assert policy.adapter is not None
    (tmp_path / "adapter").mkdir()
    policy.adapter.write(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in ParameterSource(plain)}
    of_peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    yielded, expected = merged(policy), dict(ParameterSource(of_peft))
    assert yielded.keys() == before.keys() == expected.keys()
    for name, tensor in yielded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    changed = {name for name in yielded if not torch.equal(yielded[name], before[name])}
    assert changed == {f"{module}.weight" for module in policy.adapter.modules()}


def test_a_sum_is_rounded_once(directory: Path) -> None:
    policy = adapted(directory)
    train(policy)
    exact, rounded = merged(policy), merged(policy, torch.bfloat16)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_nothing_of_the_model_is_changed_by_it(directory: Path) -> None:
    policy = adapted(directory, dtype="bfloat16")
    train(policy)
    first = merged(policy)
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())
    second = merged(policy)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_before_the_first_step_and_after_other_weights_it_is_the_base(
    directory: Path, tmp_path: Path
) -> None:
    policy = adapted(directory)
    base = dict(ParameterSource(AutoModelForCausalLM.from_pretrained(directory)))
    assert all(torch.equal(merged(policy)[name], base[name]) for name in base)
    first = [parameter.clone() for parameter in policy.parameters()]
    train(policy)
    assert not all(torch.equal(merged(policy)[name], base[name]) for name in base)
    other = save_tiny_llama(tmp_path / "other", 2)
    policy.load_weights(other)
    expected = dict(ParameterSource(AutoModelForCausalLM.from_pretrained(other)))
    assert all(torch.equal(merged(policy)[name], expected[name]) for name in expected)
    again = list(policy.parameters())
    assert [parameter.shape for parameter in first] == [parameter.shape for parameter in again]
    train(policy)
    assert all(parameter.abs().sum() > 0 for parameter in again), "both halves learn"
