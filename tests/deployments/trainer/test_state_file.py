"""The state of a rank on disk, and what a restart takes from it; two ranks over Gloo."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deployments.trainer.state_file import StateFile, resume
from tests.trainers import tiny
from trainers.fsdp2 import shard_policy
from trainers.learner import Learner
from trainers.policy import Policy
from trainers.settings import LearnerConfig, OptimizerConfig
from trainers.sources import ParameterSource

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-4), share_prompts=False)
BATCH = [
    tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0),
    tiny.trajectory((3, 4), (7, 1), advantage=-1.0),
]
Weights = dict[str, torch.Tensor]


def weights(policy: Policy) -> Weights:
    return {name: tensor.clone() for name, tensor in ParameterSource(policy.model)}


def load(policy: Policy, values: Weights, *, dtype: torch.dtype) -> None:
    """What a restarted trainer has read from the store."""
    with torch.no_grad():
        for name, tensor in policy.model.state_dict().items():
            tensor.copy_(values[name].to(dtype))


def equal(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    file = StateFile(tmp_path / "trainer", 1)
    file.write({"steps_done": 4}, 4)
    assert file.path == tmp_path / "trainer" / "trainer_state.rank1.pt"
    assert synced == [str(file.path.with_suffix(".partial")), str(file.path.parent)]
    assert file.read() == {"steps_done": 4}
    file.remove()
    file.remove()
    with pytest.raises(FileNotFoundError):
        file.read()


def test_a_full_disk_leaves_the_former_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path, 0)
    file.write({"steps_done": 4}, 4)
    file.path.with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        file.write({"steps_done": 5, "weights": torch.zeros(1 << 20)}, 5)
    assert file.read() == {"steps_done": 4}
    assert [entry.name for entry in tmp_path.iterdir()] == [file.path.name]


def test_weights_of_the_same_step_that_are_not_those_of_the_state_stay(tmp_path: Path) -> None:
    learner = Learner(tiny.policy(tmp_path), CONFIG)
    learner.step(BATCH)
    file = StateFile(tmp_path, 0)
    file.write(learner.state_dict(wire_dtype="bfloat16"), 1)
    resumed = Learner(Policy.load(tmp_path), CONFIG)
    load(resumed.policy, weights(tiny.policy(tmp_path / "other", seed=1)), dtype=torch.bfloat16)
    before = weights(resumed.policy)
    assert resume(resumed, file, 1) == "weights as stored, moments of step 1"
    assert equal(weights(resumed.policy), before)


def test_a_state_of_another_model_is_not_restored(tmp_path: Path) -> None:
    learner = Learner(tiny.policy(tmp_path / "a", "llama"), CONFIG)
    learner.step(BATCH)
    file = StateFile(tmp_path, 0)
    file.write(learner.state_dict(), 1)
    other = Learner(tiny.policy(tmp_path / "b", "qwen3-moe"), CONFIG)
    assert "must have shape" in str(resume(other, file, 1))
    assert other.step(BATCH)["step"] == 2


def test_a_state_written_before_master_weights_were_saved_still_opens(tmp_path: Path) -> None:
    learner = Learner(tiny.policy(tmp_path), CONFIG)
    learner.step(BATCH)
    optimizer = learner._optimizer.state_dict()
    schedule = learner._schedule.state_dict()
    torch.save({"optimizer": optimizer, "schedule": schedule, "steps_done": 1}, StateFile(tmp_path, 0).path)
    resumed = Learner(learner.policy, CONFIG)
    assert resume(resumed, StateFile(tmp_path, 0), 1) == "weights as stored, moments of step 1"
    assert resumed.step(BATCH)["step"] == 2


def rank_of_two(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    try:
        outcomes = _train_and_resume(rank, directory)
        if rank == 0:
            torch.save(outcomes, directory / "out.pt")
    finally:
        dist.destroy_process_group()


def _train_and_resume(rank: int, directory: Path) -> list[object]:
    file = StateFile(directory, rank)
    straight = _sharded(directory)
    straight.step(BATCH)
    file.write(straight.state_dict(wire_dtype="bfloat16"), 1)
    trained = weights(straight.policy)
    straight.step(BATCH)

    resumed = _sharded(directory, stored=trained)
    outcomes: list[object] = [resume(resumed, file, 1), equal(weights(resumed.policy), trained)]
    resumed.step(BATCH)
    outcomes.append(equal(weights(resumed.policy), weights(straight.policy)))

    if rank == 1:
        file.path.write_bytes(b"")
    stored = _sharded(directory, stored=trained)
    before = weights(stored.policy)
    outcomes += [resume(stored, file, 1), equal(weights(stored.policy), before)]
    outcomes.append(stored.step(BATCH)["step"])
    return outcomes


def _sharded(directory: Path, stored: Weights | None = None) -> Learner:
    policy = Policy.load(directory)
    if stored is not None:
        load(policy, stored, dtype=torch.bfloat16)
    shard_policy(policy)
    return Learner(policy, CONFIG)


def test_ranks_restore_their_own_shards_and_all_of_them_or_none(tmp_path: Path) -> None:
    tiny.policy(tmp_path)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(rank_of_two, args=(tmp_path,), nprocs=2, join=True)
    exact, same, continued, damaged, as_stored, step = torch.load(tmp_path / "out.pt")
    assert exact is None and same and continued
    assert "trainer_state.rank1.pt cannot be used: " in damaged and as_stored and step == 2
    # Rank 0's state is whole, but of half of each parameter.
    single = Learner(Policy.load(tmp_path), CONFIG)
    assert "must have shape" in str(resume(single, StateFile(tmp_path, 0), 1))
    assert single.step(BATCH)["step"] == 2
