"""What one rank of several reads of a checkpoint: exactly its part of what an ordinary load makes.

The group is torch's fake one, whose ranks do not hear each other: a load needs nobody else. It is always the
second of two ranks, for torch remembers what part of a tensor a process has; `test_fsdp2` has both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_models import save_tiny_mtp, save_tiny_tied_twice
from tests.trainers import tiny
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.settings import LoraConfig
from trainers.trained_policy import TrainedPolicy

pytestmark = pytest.mark.slow  # each reads a whole checkpoint


@contextmanager
def as_one_of(ranks: int) -> Iterator[DeviceMesh]:
    """The mesh of so many ranks, as the second of them sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        yield mesh_of_all_ranks("cpu")
    finally:
        dist.destroy_process_group()


def second_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(2)[1]


def save_experts(directory: Path) -> None:
    """Three experts, each under names of its own in the checkpoint, in bfloat16 and in several files."""
    model = tiny.model("qwen3-moe", num_experts=3, vocab_size=41).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="4KB")
    assert any("experts.2.up_proj" in name for name in tensors_of(directory))
    assert len(list(directory.glob("*.safetensors"))) > 2


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}


MODELS: dict[str, Callable[[Path], object]] = {
    "tied": lambda directory: tiny.save(directory, "llama-tied"),
    "tied and stored twice": lambda directory: save_tiny_tied_twice(directory, 0),
    "experts": save_experts,
    "buffers, and layers that transformers leaves out": lambda directory: save_tiny_mtp(directory, 0),
}


@pytest.mark.parametrize("save", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_rank_reads_its_part_of_every_parameter_and_all_buffers(
    tmp_path: Path, save: Callable[[Path], object], dtype: str
) -> None:
    save(tmp_path)
    whole = TrainedPolicy.load(tmp_path, dtype=dtype).model
    with as_one_of(2) as mesh:
        sharded = TrainedPolicy.load(tmp_path, dtype=dtype, mesh=mesh).model
    assert list(sharded.state_dict()) == list(whole.state_dict())
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name)
        assert isinstance(parameter, DTensor) and parameter.shape == expected.shape, name
        assert torch.equal(parameter.to_local(), second_half(expected)), name
        assert parameter.dtype == expected.dtype and parameter.requires_grad
        deepcopy(parameter.detach())  # as a checkpoint does; a part of a mapped file cannot be copied so
    buffers = dict(whole.named_buffers())
    assert buffers.keys() == dict(sharded.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in sharded.named_buffers())
    tied, expected_tied = (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
        for model in (sharded, whole)
    )
    assert tied == expected_tied and sharded.training == whole.training


def test_every_rank_begins_with_the_adapter_that_one_process_has(tmp_path: Path) -> None:
    lora, whole = LoraConfig(name="a", rank=2), tiny.policy(tmp_path, "qwen3")
    expected = whole.adapt(lora, seed=3).tensors()
    with as_one_of(2) as mesh:
        adapter = TrainedPolicy.load(tmp_path, mesh=mesh).adapt(lora, seed=3)
    assert adapter.tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter.tensors().items())
    assert not any(isinstance(tensor, DTensor) for tensor in adapter.parameters())


def lack(directory: Path, name: str) -> None:
    tensors = tensors_of(directory)
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_without_a_parameter_is_refused(tmp_path: Path, sharded: bool) -> None:
    policy = tiny.policy(tmp_path)
    lack(tmp_path, "model.norm.weight")
    sentence = "lacks 1 of the parameters .* 'model.norm.weight'"
    with as_one_of(2) as mesh, pytest.raises(ValueError, match=sentence):
        TrainedPolicy.load(tmp_path, mesh=mesh if sharded else None)
    before = policy.model.state_dict()["model.embed_tokens.weight"].clone()
    with pytest.raises(ValueError, match=sentence):
        policy.load_weights(tmp_path)
    assert torch.equal(policy.model.state_dict()["model.embed_tokens.weight"], before)


def test_weights_of_another_model_are_refused_and_those_of_the_same_are_read_in_shards(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "first", "qwen3-moe")
    tiny.save(tmp_path / "second", "qwen3-moe", seed=1)
    tiny.save(tmp_path / "other", "qwen3-moe", vocab_size=41)
    expected = TrainedPolicy.load(tmp_path / "second").model
    with as_one_of(2) as mesh:
        policy = TrainedPolicy.load(tmp_path / "first", mesh=mesh)
        before = {name: p.to_local().clone() for name, p in policy.model.named_parameters()}
        with pytest.raises(ValueError, match="tensors do not match the model"):
            policy.load_weights(tmp_path / "other")
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(parameter.to_local(), before[name])
        policy.load_weights(tmp_path / "second")
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(parameter.to_local(), second_half(expected.get_parameter(name)))


def test_more_ranks_than_each_can_have_an_expert_of_are_refused(tmp_path: Path) -> None:
    save_experts(tmp_path)
    sentence = (
        r"'model.layers.0.mlp.experts.\w+' has 3 rows, 1 for each rank .* got 4, of which the last has none"
    )
    with as_one_of(4) as mesh, pytest.raises(ValueError, match=sentence):
        TrainedPolicy.load(tmp_path, mesh=mesh)
