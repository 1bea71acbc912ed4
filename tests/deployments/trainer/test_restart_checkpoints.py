import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from deployments.protocol.errors import JournalError
from deployments.trainer.restart_checkpoints import RestartCheckpoints, restore, resume
from deployments.trainer.spec import state_directory
from deployments.weights.store.versions import Store
from tests.deployments.trainer.one_worker import Tensors, equal
from tests.trainers import tiny
from tests.two_ranks import both, grouped
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.learner import Learner
from trainers.settings import Dtype, LearnerConfig, LoraConfig, OptimizerConfig
from trainers.sources import ParameterSource, load_parameters
from trainers.trained_policy import TrainedPolicy

pytestmark = pytest.mark.slow  # optimizer steps

CONFIG = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-4))
BATCH = [tiny.trajectory((3, 4), (5, 6, 1), advantage=1.0), tiny.trajectory((3, 4), (7, 1), advantage=-1.0)]


def weights(policy: TrainedPolicy) -> Tensors:
    return {name: tensor.clone() for name, tensor in ParameterSource(policy.model)}


def load(policy: TrainedPolicy, values: Tensors, *, dtype: torch.dtype) -> None:
    """What a restarted trainer has read from the store."""
    load_parameters(policy.model, {name: value.to(dtype) for name, value in values.items()})


def near(left: Tensors, right: Tensors) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-3, atol=2e-5) for name in left)


def checkpoints(directory: Path, *, rank: int = 0) -> RestartCheckpoints:
    return RestartCheckpoints(directory / "checkpoints", rank=rank, keep=2)


def save(
    learner: Learner, kept: RestartCheckpoints, *, wire_dtype: Dtype | None = None, **options: Any
) -> None:
    assert kept.save(learner, wire_dtype=wire_dtype, **options)
    kept.wait_until_copied()
    assert kept.wait(60.0)


def resumed_from(
    kept: RestartCheckpoints, learner: Learner, step: int, *, digest: str | None = None
) -> str | None:
    return resume(learner, kept, kept.complete(), step, digest)


def names(kept: RestartCheckpoints) -> list[str]:
    return sorted(entry.name for entry in kept.directory.iterdir())


def stepped(directory: Path) -> Learner:
    learner = Learner(tiny.policy(directory), CONFIG)
    learner.step(BATCH)
    return learner


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_checkpoint_of_a_run_is_of_its_own_step(tmp_path: Path, device: str) -> None:
    tiny.policy(tmp_path)
    kept = RestartCheckpoints(tmp_path / "checkpoints", rank=0, keep=3)
    learner = Learner(TrainedPolicy.load(tmp_path, device=device), CONFIG)
    after: dict[int, Tensors] = {}
    for step in (1, 2, 3, 4):
        learner.step(BATCH)  # while the former one is written
        after[step] = weights(learner.policy)
        if step < 4:
            assert kept.wait(60.0)
            assert kept.save(learner, wire_dtype="bfloat16")
            kept.wait_until_copied()
    assert kept.wait(60.0)
    for step in (1, 2, 3):
        resumed = Learner(TrainedPolicy.load(tmp_path, device=device), CONFIG)
        load(resumed.policy, after[step], dtype=torch.bfloat16)
        assert resumed_from(kept, resumed, step) is None
        assert equal(weights(resumed.policy), after[step])
        resumed.step(BATCH)
        assert near(weights(resumed.policy), after[step + 1])


def test_a_checkpoint_has_its_name_when_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    directory = state_directory(store.directory)
    learner, kept = stepped(tmp_path), checkpoints(directory)
    during: list[list[str]] = []
    written: list[str] = []
    write = dcp.save

    def watched(*arguments: Any, **named: Any) -> Any:
        result = write(*arguments, **named)
        during.append(names(kept))
        written.extend(store.being_written())
        return result

    monkeypatch.setattr(dcp, "save", watched)
    save(learner, kept)
    ((partial,),) = during
    assert [each[:12] for each in written] == ["step-000001-"], "a stop of the fleet waits for it"
    assert store.being_written() == []
    assert partial.startswith(".step-000001-") and partial.endswith(".partial")
    assert names(kept) == ["step-000001"]
    (kept.directory / ".step-000009-dead.partial").mkdir()  # its writer was killed
    assert store.being_written() == [] and names(checkpoints(directory)) == ["step-000001"]


def test_a_disk_that_hangs_costs_checkpoints_and_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    free, write = threading.Event(), dcp.save

    def hanging(*arguments: Any, **named: Any) -> Any:
        assert free.wait(60.0)
        return write(*arguments, **named)

    monkeypatch.setattr(dcp, "save", hanging)
    assert kept.save(learner, wire_dtype=None)
    kept.wait_until_copied()
    assert learner.step(BATCH)["step"] == 2
    assert not kept.save(learner, wire_dtype=None)
    assert not kept.wait(0.01)
    free.set()
    assert kept.wait(60.0)
    assert names(kept) == ["step-000001"]
    free.clear()
    assert kept.save(learner, wire_dtype=None)
    kept.wait_until_copied()
    kept.discard()  # as a rollback does
    free.set()
    assert kept.wait(60.0)
    assert names(kept) == []


def test_a_second_run_that_comes_as_far_replaces_the_first_ones_checkpoint(tmp_path: Path) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    save(learner, kept, wire_dtype="bfloat16")
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter += 0.01
    save(learner, kept, wire_dtype="bfloat16")
    resumed = Learner(TrainedPolicy.load(tmp_path), CONFIG)
    load(resumed.policy, weights(learner.policy), dtype=torch.bfloat16)
    assert resumed_from(kept, resumed, 1) is None
    assert equal(weights(resumed.policy), weights(learner.policy))


def test_nothing_is_replaced_or_removed_where_the_store_is_no_longer_this_fleets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner, theirs = stepped(tmp_path), checkpoints(tmp_path)
    save(learner, theirs)

    def refuse() -> None:
        raise JournalError("the store belongs to fleet another")

    kept = RestartCheckpoints(theirs.directory, rank=0, keep=0, check_owner=refuse)
    save(learner, kept)
    assert "failed to save the trainer's checkpoint of step 1" in caplog.text
    assert "belongs to fleet another" in caplog.text
    with pytest.raises(JournalError):
        kept.discard()
    assert [each.name for each in theirs.directory.iterdir()] == ["step-000001"]


def test_weights_of_the_same_step_that_are_not_those_of_the_checkpoint_stay(tmp_path: Path) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    save(learner, kept, wire_dtype="bfloat16")
    resumed = Learner(TrainedPolicy.load(tmp_path), CONFIG)
    load(resumed.policy, weights(tiny.policy(tmp_path / "other", seed=1)), dtype=torch.bfloat16)
    before = weights(resumed.policy)
    assert resumed_from(kept, resumed, 1) == "weights as stored, moments of step 1"
    assert equal(weights(resumed.policy), before)


def test_a_trainer_that_went_back_keeps_the_checkpoints_that_it_makes_from_then_on(tmp_path: Path) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    learner.step(BATCH)
    learner.step(BATCH)
    save(learner, kept)  # of step 3
    learner.step(BATCH)
    save(learner, kept)
    back, again = Learner(TrainedPolicy.load(tmp_path), CONFIG), checkpoints(tmp_path)
    assert resumed_from(again, back, 0) == "weights as stored, moments of step 3"
    back.step(BATCH)
    save(back, again)
    assert names(again) == ["step-000001"]
    back.step(BATCH)
    save(back, again)
    assert names(again) == ["step-000001", "step-000002"]


def test_a_checkpoint_of_the_same_step_and_another_version_is_not_exact(tmp_path: Path) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    save(learner, kept, digest="aa")
    resumed = Learner(TrainedPolicy.load(tmp_path), CONFIG)
    assert resumed_from(kept, resumed, 1, digest="bb") == "weights as stored, moments of step 1"
    assert kept.step is None
    load(resumed.policy, weights(learner.policy), dtype=torch.float32)
    assert resumed_from(kept, resumed, 1, digest="aa") is None
    assert kept.step == 1


def test_an_old_checkpoint_that_cannot_be_removed_is_no_fault_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)
    for _ in range(2):
        save(learner, kept)
        learner.step(BATCH)

    def refuse(path: Path) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(kept, "_remove", refuse)
    save(learner, kept)
    said = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert said == ["failed to remove an old checkpoint of the trainer: OSError: read-only"]
    assert kept.step == 3 and "step-000003" in names(kept)


def test_a_checkpoint_of_another_model_is_not_restored(tmp_path: Path) -> None:
    learner = Learner(tiny.policy(tmp_path / "a", "llama"), CONFIG)
    learner.step(BATCH)
    kept = checkpoints(tmp_path)
    save(learner, kept)
    other = Learner(tiny.policy(tmp_path / "b", "qwen3-moe"), CONFIG)
    problem = resumed_from(kept, other, 1)
    assert problem is not None and "step-000001 cannot be used: ValueError: exp_avg" in problem
    assert "expected" in problem and other.step(BATCH)["step"] == 2


def test_an_error_of_the_copy_is_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner, kept = stepped(tmp_path), checkpoints(tmp_path)

    def no_memory(tensors: Any) -> Any:
        raise MemoryError("no host memory")

    monkeypatch.setattr(kept, "_copy", no_memory)
    save(learner, kept)
    (line,) = caplog.messages
    assert line.startswith(
        "failed to save the trainer's checkpoint of step 1, the previous ones stay: Memory"
    )
    assert kept.step is None


# RestartCheckpoints of one process and of two ranks over Gloo: any number of ranks resumes from them.


LORA = LoraConfig(name="math", rank=2)


def rank_of_two(rank: int, directory: Path) -> None:
    with grouped(rank, directory):
        outcomes = _train_and_resume(rank, directory)
        _fail_and_agree(rank, directory)
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


def _fail_and_agree(rank: int, directory: Path) -> None:
    """The disk refuses rank 0's part of a checkpoint; the others see nothing of it."""
    kept = RestartCheckpoints(directory / "failing", rank=rank, keep=2)
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
    assert not kept.save(learner, wire_dtype=None, due=2 - (kept.step or 0) >= every)
    save(learner, kept, due=kept.step is None)
    dist.barrier()
    assert (kept.directory / "step-000002").is_dir()


def _sharded(directory: Path, stored: Tensors | None = None, lora: LoraConfig | None = None) -> Learner:
    policy = TrainedPolicy.load(directory, mesh=mesh_of_all_ranks("cpu"))
    if lora is not None:
        policy.adapt(lora, seed=7)
    if stored is not None:
        load(policy, stored, dtype=torch.bfloat16)
    return Learner(policy, CONFIG)


@pytest.mark.timeout(300)
def test_any_number_of_ranks_resumes_all_of_them_or_none_and_they_agree_after_a_fault_of_one(
    tmp_path: Path,
) -> None:
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
