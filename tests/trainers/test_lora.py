from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from tests.trainers import tiny
from tests.two_ranks import both, grouped
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.learner import Learner
from trainers.lora import TENSORS, safetensors_file
from trainers.settings import LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from trainers.trained_policy import BaseOf, TrainedPolicy

pytestmark = pytest.mark.timeout(300)

LEARNING = LearnerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
    max_tokens_per_microbatch=8,
)
LORA = LoraConfig(name="math", rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))


def adapted(directory: Path, lora: LoraConfig = LORA, kind: str = "llama", **loading: Any) -> TrainedPolicy:
    tiny.save(directory, kind)
    policy = TrainedPolicy.load(directory, **loading)
    policy.adapt(lora, seed=7)
    return policy


def trained(policy: TrainedPolicy, steps: int = 2, config: LearnerConfig = LEARNING) -> Learner:
    learner = Learner(policy, config)
    for _ in range(steps):
        learner.step(tiny.BATCH)
    return learner


def written(
    policy: TrainedPolicy, directory: Path, dtype: torch.dtype | None = None, **metadata: str
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    assert policy.adapter is not None
    for name, content in policy.adapter.files(dtype=dtype, metadata=metadata or None).items():
        (directory / name).write_bytes(content.numpy())
    return directory


def test_a_step_changes_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    policy = adapted(tmp_path)
    before, adapter = dict(policy.model.state_dict()), tiny.trained(policy)
    base = {name: tensor.clone() for name, tensor in before.items() if ".lora_" not in name}
    metrics = trained(policy, 1).step(tiny.BATCH)
    assert metrics["step"] == 2 and metrics["skipped"] is False
    after = policy.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    changed = tiny.trained(policy)
    assert all(not torch.equal(changed[name], tensor) for name, tensor in adapter.items())
    assert len(adapter) == 2 * 2 * 2 and sum(p.numel() for p in policy.parameters()) < 1000


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen2.5-vl", marks=pytest.mark.slow)])
def test_all_linear_layers_of_the_decoder_are_adapted_by_default(tmp_path: Path, kind: str) -> None:
    policy = adapted(tmp_path, LoraConfig(name="math", rank=2), kind)
    assert policy.adapter is not None
    assert {name.rpartition(".")[2] for name in policy.adapter.modules()} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert len(policy.adapter.modules()) == 2 * 7


def test_a_module_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers of this model \(down_proj, .*v_proj\), got 'c_attn'"):
        adapted(tmp_path, LoraConfig(name="math", target_modules=("q_proj", "c_attn")))


def test_the_first_values_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first = tiny.trained(adapted(tmp_path))
    torch.manual_seed(99)
    assert tiny.equal(tiny.trained(adapted(tmp_path)), first)
    other = TrainedPolicy.load(tmp_path)
    other.adapt(LORA, seed=8)
    assert not tiny.equal(tiny.trained(other), first)


def test_the_adapter_is_float32_over_a_base_in_bfloat16(tmp_path: Path) -> None:
    policy = adapted(tmp_path / "base", dtype="bfloat16")
    trained(policy)
    assert {tensor.dtype for tensor in policy.trained().values()} == {torch.float32}
    assert policy.model.model.embed_tokens.weight.dtype == torch.bfloat16
    directory = written(policy, tmp_path / "adapter", torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(directory / TENSORS).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_reference_of_the_penalty_is_the_base_without_a_copy(tmp_path: Path) -> None:
    loss = LossConfig(kl_coefficient=0.1)
    config = LearnerConfig(**(LEARNING.model_dump() | {"loss": loss}))
    one, two = adapted(tmp_path), adapted(tmp_path)
    shared = Learner(one, config, reference=BaseOf(one))
    copied = Learner(two, config, reference=TrainedPolicy.load(tmp_path))
    for _ in range(3):
        assert shared.step(tiny.BATCH) | {"step_s": 0} == copied.step(tiny.BATCH) | {"step_s": 0}
    assert tiny.equal(tiny.trained(one), tiny.trained(two))


def test_an_adapter_of_other_settings_is_not_read(tmp_path: Path) -> None:
    policy = adapted(tmp_path / "base")
    directory = written(policy, tmp_path / "adapter")
    for lora, phrase in (
        (LORA.model_copy(update={"rank": 2}), "'r' must be 2, got 4"),
        (LORA.model_copy(update={"alpha": 1.0}), "'lora_alpha' must be 1.0, got 8.0"),
        (LORA.model_copy(update={"target_modules": ("q_proj",)}), "'target_modules' must be"),
    ):
        other = adapted(tmp_path / "other", lora).adapter
        assert other is not None
        with pytest.raises(ValueError, match=phrase):
            other.read(directory)


def test_tensors_of_another_base_are_not_taken(tmp_path: Path) -> None:
    policy = adapted(tmp_path)
    assert policy.adapter is not None
    wrong = {name: torch.zeros(1, 1) for name in tiny.trained(policy)}
    with pytest.raises(ValueError, match="8 tensors are of another adapter or base"):
        policy.adapter.restore(wrong)
    with pytest.raises(ValueError, match="8 tensors are of another adapter or base"):
        policy.adapter.restore({})


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    policy = adapted(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / TENSORS).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        assert policy.adapter is not None
        policy.adapter.write(tmp_path / "adapter")


def adapted_rank(rank: int, directory: Path) -> None:
    with grouped(rank, directory):
        policy = TrainedPolicy.load(directory, mesh=mesh_of_all_ranks("cpu"))
        policy.adapt(LORA, seed=7)
        assert policy.adapter is not None
        learner = Learner(policy, LEARNING)
        metrics = [learner.step(tiny.BATCH), learner.step(tiny.BATCH)]
        files = policy.adapter.files(dtype=torch.bfloat16, metadata={"a": "1", "b": "2"})
        torch.save((tiny.trained(policy), metrics, files), directory / f"out{rank}.pt")


@pytest.mark.slow
def test_two_ranks_train_the_same_adapter_as_one_process(tmp_path: Path) -> None:
    policy = adapted(tmp_path)
    both(adapted_rank, tmp_path)
    (first, metrics, files), (second, _, others) = (
        torch.load(tmp_path / f"out{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert tiny.equal(first, second), "each rank holds the whole adapter"
    assert tiny.equal(files, others), "and would publish the same bytes"
    learner = Learner(policy, LEARNING)
    expected = [learner.step(tiny.BATCH), learner.step(tiny.BATCH)]
    for name, tensor in tiny.trained(policy).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(expected, metrics, strict=True):
        for name in ("loss", "grad_norm", "tokens", "importance_mean", "entropy"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3), name


# -- the file of an adapter, beside what safetensors reads of it -----------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_the_file_that_is_made_here(dtype: torch.dtype, device: str) -> None:
    made = [torch.randn(3, 4), torch.randn(()), torch.randn(5, 2).T, torch.randn(2, 0)]
    floats = [each.to(device) for each in made]
    given = {f"{'x' * index}.\u00fc": each for index, each in enumerate(floats)}
    file = safetensors_file(given, dtype=dtype, metadata={"format": "pt", "a": '\u00fc"\n'})
    assert file.device.type == device
    read = load(file.cpu().numpy().tobytes())
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(read[name], tensor.to(dtype).cpu()), name
    assert int.from_bytes(file[:8].tolist(), "little") % 8 == 0, "the tensors are aligned"
