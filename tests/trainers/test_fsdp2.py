"""Two processes over Gloo: sharding must not change any result."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.trainers import tiny
from trainers.fsdp2 import shard_policy
from trainers.layers import decoder_layers
from trainers.learner import Learner
from trainers.policy import Policy
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.sources import ParameterSource

CONFIG = LearnerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_microbatch=8, share_prompts=False
)
BATCH = [
    tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0, version=4),
    tiny.trajectory((3, 4), (7, 1), advantage=-1.0, version=3),
    tiny.trajectory((8, 9, 10), (11, 12, 13), advantage=0.5, version=1),
]


def sharded_rank(rank: int, directory: Path, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    try:
        policy = Policy.load(directory)
        shard_policy(policy)
        source = ParameterSource(policy.model)
        before = {name: tensor.clone() for name, tensor in source}
        learner = Learner(policy, CONFIG)
        metrics = [learner.step(BATCH, published=4), learner.step(BATCH, published=4)]
        after = {name: tensor.clone() for name, tensor in source}
        local = sum(p.to_local().numel() for p in policy.model.parameters())  # type: ignore[attr-defined]
        policy.load_weights(directory)
        restored = {name: tensor.clone() for name, tensor in source}
        if rank == 0:
            specs = [(s.name, s.dtype, s.shape) for s in source.specs()]
            torch.save((before, after, restored, metrics, local, specs), directory / "out.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
def test_two_ranks_learn_and_publish_what_one_process_does(tmp_path: Path, kind: str) -> None:
    policy = tiny.policy(tmp_path, kind)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(sharded_rank, args=(tmp_path, kind), nprocs=2, join=True)
    before, after, restored, metrics, local, specs = torch.load(tmp_path / "out.pt", weights_only=False)

    source = ParameterSource(policy.model)
    original = {name: tensor.clone() for name, tensor in source}
    assert list(before) == list(original) == [name for name, _, _ in specs]
    assert all(torch.equal(before[name], tensor) for name, tensor in original.items())
    learner = Learner(policy, CONFIG)
    expected = [learner.step(BATCH, published=4), learner.step(BATCH, published=4)]
    for name, tensor in source:
        torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-5)
    assert all(torch.equal(restored[name], tensor) for name, tensor in original.items())
    for mine, theirs in zip(expected, metrics, strict=True):
        assert theirs.keys() == mine.keys() and mine["staleness_max"] == 3
        for name in mine.keys() - {"step_s"}:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name
    assert "logprob_difference_max" in expected[0] and "logprob_difference_max" not in expected[1]
    total = sum(p.numel() for p in policy.model.parameters())
    assert local == pytest.approx(total / 2, rel=0.1)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="ModuleList named 'layers', got Linear"):
        decoder_layers(torch.nn.Linear(1, 1))


def test_sharding_without_a_process_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        shard_policy(tiny.policy(tmp_path))
