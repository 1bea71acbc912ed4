"""RestartCheckpoints of one process and of two ranks over Gloo: any number of ranks resumes from them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deployments.trainer.restart_checkpoints import RestartCheckpoints, restore
from tests.deployments.trainer.checkpoint_scene import (
    BATCH,
    CONFIG,
    Weights,
    checkpoints,
    equal,
    load,
    near,
    resumed_from,
    save,
    weights,
)
from tests.trainers import tiny
from tests.two_ranks import both, grouped
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.learner import Learner
from trainers.settings import LoraConfig
from trainers.trained_policy import TrainedPolicy

LORA = LoraConfig(name="math", rank=2)


def rank_of_two(rank: int, directory: Path) -> None:
    with grouped(rank, directory):
        outcomes = _train_and_resume(rank, directory)
        if rank == 0:
            torch.save(outcomes, directory / "out.pt")


def _train_and_resume(rank: int, directory: Path) -> dict[str, object]:
    kept = checkpoints(directory, rank=rank)
    straight = _sharded(directory)
    straight.step(BATCH)
    save(straight, kept, wire_dtype="bfloat16")
    trained = weights(straight.policy)
    straight.step(BATCH)

    resumed = _sharded(directory, stored=trained)
    out: dict[str, object] = {"trained": trained, "exact": resumed_from(kept, resumed, 1)}
    out["same"] = equal(weights(resumed.policy), trained)
    resumed.step(BATCH)
    out["continued"] = equal(weights(resumed.policy), weights(straight.policy))
    out["after"] = weights(straight.policy)

    of_one = RestartCheckpoints(directory / "of-one", rank=rank, keep=2)
    resumed = _sharded(directory, stored=torch.load(directory / "one.pt"))
    out["from one"] = resumed_from(of_one, resumed, 1)
    resumed.step(BATCH)
    out["after one"] = weights(resumed.policy)

    out |= _resume_adapter(rank, directory)
    (file,) = (kept.directory / "step-000001").glob("__1_*.distcp")
    content = file.read_bytes()
    dist.barrier()
    if rank == 1:
        file.write_bytes(b"")
    dist.barrier()
    stored = _sharded(directory, stored=trained)
    before = weights(stored.policy)
    out["damaged"] = resumed_from(kept, stored, 1)
    out["as stored"] = equal(weights(stored.policy), before)
    out["step"] = stored.step(BATCH)["step"]
    dist.barrier()
    if rank == 1:
        file.write_bytes(content)
    dist.barrier()
    return out


def _resume_adapter(rank: int, directory: Path) -> dict[str, object]:
    """An adapter is whole on every rank, over a sharded base."""
    kept = RestartCheckpoints(directory / "adapter", rank=rank, keep=2)
    straight, resumed = _sharded(directory, lora=LORA), _sharded(directory, lora=LORA)
    straight.step(BATCH)
    save(straight, kept, wire_dtype="bfloat16")
    dist.barrier()
    ((path, meta),) = kept.complete()
    problem = restore(resumed, kept, path, meta, exact=True)
    resumed.restart(meta.step, keep_moments=True)
    same = equal(straight.policy.trained(), resumed.policy.trained())
    straight.step(BATCH)
    resumed.step(BATCH)
    same_after = equal(straight.policy.trained(), resumed.policy.trained())
    return {"adapter": (problem, same, same_after)}


def rank_that_may_fail(rank: int, directory: Path) -> None:
    """The disk refuses rank 0's part of a checkpoint; the others see nothing of it."""
    with grouped(rank, directory):
        kept = checkpoints(directory, rank=rank)
        learner = _sharded(directory)
        learner.step(BATCH)

        def refuse(*_: object) -> None:
            raise OSError("no space left on device")

        finish, kept._finish = kept._finish, refuse  # type: ignore[method-assign]
        save(learner, kept)
        kept._finish = finish  # type: ignore[method-assign]
        assert kept.step == (None if rank == 0 else 1)
        learner.step(BATCH)
        every = 10  # the ranks do not agree on whether a checkpoint is due
        begun = kept.save(learner, wire_dtype=None, due=2 - (kept.step or 0) >= every)
        assert not begun
        begun = kept.save(learner, wire_dtype=None, due=kept.step is None)
        assert begun
        kept.wait_until_copied()
        assert kept.wait(60.0)
        dist.barrier()
        assert (kept.directory / "step-000002").is_dir()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_ranks_agree_on_a_checkpoint_after_a_fault_of_one(tmp_path: Path) -> None:
    tiny.policy(tmp_path)
    both(rank_that_may_fail, tmp_path)


def _sharded(directory: Path, stored: Weights | None = None, lora: LoraConfig | None = None) -> Learner:
    policy = TrainedPolicy.load(directory, mesh=mesh_of_all_ranks("cpu"))
    if lora is not None:
        policy.adapt(lora, seed=7)
    if stored is not None:
        load(policy, stored, dtype=torch.bfloat16)
    return Learner(policy, CONFIG)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_any_number_of_ranks_resumes_and_all_of_them_or_none(tmp_path: Path) -> None:
    tiny.policy(tmp_path)
    single = Learner(TrainedPolicy.load(tmp_path), CONFIG)
    single.step(BATCH)
    save(single, RestartCheckpoints(tmp_path / "of-one", rank=0, keep=2), wire_dtype="bfloat16")
    torch.save(weights(single.policy), tmp_path / "one.pt")
    both(rank_of_two, tmp_path)
    out = torch.load(tmp_path / "out.pt")
    assert out["exact"] is None and out["same"] and out["continued"]
    assert out["adapter"] == (None, True, True)
    assert "step-000001 cannot be used: " in out["damaged"] and "\n" not in out["damaged"]
    assert out["as stored"] and out["step"] == 2
    single.step(BATCH)
    assert out["from one"] is None and near(out["after one"], weights(single.policy))
    resumed = Learner(TrainedPolicy.load(tmp_path), CONFIG)  # what two ranks have written, on one
    load(resumed.policy, out["trained"], dtype=torch.bfloat16)
    assert resumed_from(checkpoints(tmp_path), resumed, 1) is None
    assert equal(weights(resumed.policy), out["trained"])
    resumed.step(BATCH)
    assert near(weights(resumed.policy), out["after"])
