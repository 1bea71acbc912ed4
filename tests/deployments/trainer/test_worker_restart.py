import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from safetensors.torch import load_file

from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.replica.host_store import HostStore
from deployments.trainer import stored_weights
from deployments.trainer.spec import TrainerSpec, state_directory
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.versions import Store
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer import one_worker
from tests.deployments.trainer.trainer_specs import with_config
from tests.deployments.version_holder import holder
from tests.full_disk import full_disk


def checkpoints(spec: TrainerSpec) -> list[Path]:
    return sorted((state_directory(spec.store_dir) / "checkpoints").glob("*step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wire_dtype"),
    [
        ("all", None),
        ("all", "bfloat16"),
        ("merged", "bfloat16"),
        ("merged on a stored version", None),
        ("drafter", "bfloat16"),
        ("merged drafter", None),
        ("mtp", "bfloat16"),
        ("mtp of experts", "bfloat16"),
    ],
)
def test_a_restarted_trainer_is_exactly_where_it_was(
    kind: str, wire_dtype: str | None, tmp_path: Path, controller: ControllerInProcess
) -> None:
    """Also where weights are published, and so stored, rounded."""
    spec = one_worker.spec_of(tmp_path, kind, wire_dtype=wire_dtype)
    steps = 2
    if "stored" in kind:
        spec = with_config(spec, loss={"kl_coefficient": 10.0})  # from the model, not from the base
        one_worker.trained(with_config(spec, checkpoint_every=0), controller, steps=1)
        steps = 3
    straight = one_worker.started(spec, controller)
    one_worker.go_on(straight, 2)
    resumed = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    loaded = resumed.load(("", 0))
    assert (loaded.version, loaded.step, loaded.fleet_id) == (steps, steps, controller.status.fleet_id)
    before = one_worker.everything(straight)
    assert one_worker.equal(one_worker.everything(resumed), before)
    assert one_worker.equal(before, one_worker.stored(spec, steps)) is (wire_dtype is None)
    if kind == "all":
        assert loaded.parameters == sum(tensor.numel() for tensor in before.values())
    assert [one_worker.of_step(resumed), one_worker.of_step(resumed)] == [
        one_worker.of_step(straight),
        one_worker.of_step(straight),
    ]
    assert one_worker.equal(one_worker.everything(resumed), one_worker.everything(straight))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "merged", "drafter", "mtp"])
def test_a_rollback_publishes_the_old_weights_as_a_newer_version_and_goes_on_from_them(
    kind: str, tmp_path: Path, controller: ControllerInProcess
) -> None:
    spec = one_worker.spec_of(tmp_path, kind)
    worker = one_worker.trained(spec, controller, steps=2)
    assert not one_worker.equal(controller.received, one_worker.stored(spec, 1))
    worker.load_version(1)
    assert one_worker.published(worker, "rollback to 1").version == 3
    assert one_worker.equal(controller.received, one_worker.stored(spec, 1))
    one_worker.go_on(worker, 1)
    assert one_worker.equal(
        one_worker.everything(one_worker.started(spec, controller)), one_worker.everything(worker)
    )
    with pytest.raises(InvalidRequest, match=r"version 9 must be in .*, and there is none"):
        worker.load_version(9)


def test_a_restart_without_a_checkpoint_resumes_the_schedule(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    one_worker.trained(with_config(spec, checkpoint_every=0), controller, steps=1)
    metrics = one_worker.started(spec, controller).step(one_worker.BATCH)
    assert metrics["step"] == 2 and metrics["learning_rate"] == pytest.approx(1e-3 * 2 / 5)


def test_before_the_first_step_there_is_nothing_to_save(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = one_worker.started(spec, controller)
    worker.publish(None)
    worker.save_checkpoint()
    assert worker.flush(30.0)
    assert not checkpoints(spec)


@pytest.mark.slow
def test_one_step_that_is_published_twice_is_saved_once(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = one_worker.trained(spec, controller, steps=1)
    (before,) = checkpoints(spec)
    written = before.stat().st_mtime_ns
    worker.publish(None)
    worker.save_checkpoint()
    assert worker.flush(30.0)
    assert checkpoints(spec) == [before] and before.stat().st_mtime_ns == written
    worker.load_version(1)
    assert not checkpoints(spec), "those of before the rollback are gone"
    worker.publish("rollback to 1")
    worker.save_checkpoint()
    assert worker.flush(30.0)
    assert checkpoints(spec) == [before]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["checkpoint.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_costs_the_moments_and_not_the_trainer(
    spec: TrainerSpec,
    tmp_path: Path,
    file: str,
    caplog: pytest.LogCaptureFixture,
    controller: ControllerInProcess,
) -> None:
    worker = one_worker.trained(spec, controller, steps=1)
    (checkpoint,) = checkpoints(spec)
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(content[: len(content) // 2])
    with caplog.at_level("INFO", "ray.serve"):
        resumed = one_worker.started(spec, controller)
    (line,) = one_worker.lines(caplog)
    assert line.startswith("the trainer resumes from version 1, step 1; moments start at zero: ")
    assert str(checkpoint.parent) in line and "\n" not in line
    assert one_worker.equal(
        one_worker.saved(resumed, tmp_path / "resumed again"),
        one_worker.saved(worker, tmp_path / "trained on"),
    )
    assert resumed.step(one_worker.BATCH)["step"] == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_leaves_the_one_before(
    spec: TrainerSpec, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    one_worker.trained(spec, controller, steps=3)
    older, newest = checkpoints(spec)
    assert (older.name, newest.name) == ("step-000002", "step-000003"), "two are kept"
    (newest / "__0_0.distcp").write_bytes(b"")
    with caplog.at_level("INFO", "ray.serve"):
        one_worker.started(spec, controller)
    assert one_worker.lines(caplog) == [
        "the trainer resumes from version 3, step 3; weights as stored, moments of step 2"
    ]


@pytest.mark.slow
def test_a_full_disk_does_not_end_training(
    spec: TrainerSpec, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    worker = one_worker.trained(spec, controller, steps=1)
    worker.step(one_worker.BATCH)
    worker.publish(None)
    assert worker.flush(30.0)
    controller.close()  # it writes to that disk, too
    with caplog.at_level("INFO", "ray.serve"), full_disk(1 << 14):
        worker.save_checkpoint()
        assert worker.flush(30.0)
    (line,) = one_worker.lines(caplog)
    assert line.startswith("failed to save the trainer's checkpoint of step 2, the previous ones stay: ")
    assert [each.name for each in checkpoints(spec)] == ["step-000001"]
    worker.save_checkpoint()
    assert worker.flush(30.0)
    assert [each.name for each in checkpoints(spec)] == ["step-000001", "step-000002"]


def damage(spec: TrainerSpec, version: int) -> None:
    """One byte, as a disk loses it."""
    file = Path(spec.store_dir) / f"v{version:08d}" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def lose(spec: TrainerSpec, version: int) -> Path:
    """Its trainer was killed before it was written; where it is now."""
    directory = Path(spec.store_dir) / f"v{version:08d}"
    return directory.rename(directory.with_name("lost"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["damaged", "lost"])
def test_without_the_committed_version_the_one_before_is_loaded_and_replaces_it_only_when_told(
    spec: TrainerSpec,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    controller: ControllerInProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_weights, "STORE_WAIT_S", 0.0)
    one_worker.trained(spec, controller, steps=2)
    damage(spec, 2) if fault == "damaged" else lose(spec, 2)
    worker = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    loaded = worker.load(("127.0.0.1", 0))
    assert (loaded.version, loaded.step) == (1, 1) and loaded.missed is not None
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert errors == [loaded.missed]
    assert loaded.missed.startswith("the trainer has version 1, and version 2 is committed: version 2 ")
    assert ("is damaged" if fault == "damaged" else "and there is none") in loaded.missed
    assert "go back to version 1 (POST /fleet/rollback)" in loaded.missed
    with pytest.raises(Conflict, match="version 2 is committed, and these weights continue from version 1"):
        worker.publish(None, loaded.version)
    report = worker.publish(None, 2)
    assert report is not None and report.version == 3
    assert one_worker.equal(controller.received, load_file(controller.directory_of(1) / "model.safetensors"))


@pytest.mark.slow
async def test_a_trainer_on_a_host_of_its_own_takes_versions_from_a_replica(tmp_path: Path) -> None:
    """The committed one when it starts, and an older one for a rollback. They do not pile up there."""
    controller = ControllerInProcess(tmp_path / "state", shared_store=False)
    spec = replace(one_worker.small_spec(tmp_path), store_keep=2)
    there = replace(spec, store_dir=str(tmp_path / "there" / "store"))
    trained = await asyncio.to_thread(one_worker.trained, spec, controller, steps=3)
    async with holder(HostStore(Path(spec.store_dir), 2)) as peer:
        controller.replica.endpoint = peer
        worker = await asyncio.to_thread(one_worker.started, there, controller)
        assert one_worker.equal(one_worker.everything(worker), one_worker.everything(trained))
        await asyncio.to_thread(worker.load_version, 2)
        assert Store(Path(there.store_dir)).list() == [2, 3]
        await asyncio.to_thread(one_worker.published, worker)
        assert worker.flush(30.0) and one_worker.equal(controller.received, one_worker.stored(spec, 2))
    with pytest.raises(InvalidRequest, match=r"version 1 is not loaded: no replica gave version 1"):
        await asyncio.to_thread(worker.load_version, 1)
    await asyncio.to_thread(one_worker.started, replace(there, store_keep=1), controller)
    assert Store(Path(there.store_dir)).list() == [4]
    controller.close()


@pytest.mark.slow
def test_a_version_that_is_stored_late_is_waited_for(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_worker.trained(spec, controller, steps=2)
    lost = lose(spec, 2)

    def sleep(duration_s: float) -> None:
        lost.rename(lost.with_name("v00000002"))

    monkeypatch.setattr(stored_weights.time, "sleep", sleep)
    loaded = TrainerWorker(spec, 0, controller).load(("127.0.0.1", 0))  # type: ignore[arg-type]
    assert (loaded.version, loaded.missed) == (2, None)


@pytest.mark.slow
def test_with_no_version_at_all_the_model_replaces_what_is_served_only_when_told(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "STORE_WAIT_S", 0.0)
    one_worker.trained(spec, controller, steps=1)
    lose(spec, 1)
    loaded = TrainerWorker(spec, 0, controller).load(("127.0.0.1", 0))  # type: ignore[arg-type]
    assert loaded.version == 0 and loaded.missed is not None
    assert loaded.missed.endswith(
        'until it is told what to do: replace version 1 (POST /train/publish with "after": 1)'
    )


@pytest.mark.slow
def test_a_trainer_does_not_start_where_every_version_is_damaged(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    one_worker.trained(spec, controller, steps=2)
    damage(spec, 1)
    damage(spec, 2)
    with pytest.raises(ValueError, match=r"no version in .* can be used: version 2 .*; version 1"):
        one_worker.started(spec, controller)


@pytest.mark.slow
def test_a_rollback_to_a_damaged_version_is_refused_and_changes_nothing(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = one_worker.trained(spec, controller, steps=2)
    one_worker.published(worker)
    before = {name: tensor.clone() for name, tensor in controller.received.items()}
    damage(spec, 1)
    with pytest.raises(InvalidRequest, match=r"version 1 is not loaded: version 1 in .* is damaged"):
        worker.load_version(1)
    one_worker.published(worker)
    assert one_worker.equal(controller.received, before)
    damage(spec, 1)
    worker.load_version(1)
    one_worker.published(worker)
    assert not one_worker.equal(controller.received, before)


@pytest.mark.slow
def test_a_rollback_whose_checkpoints_cannot_be_removed_changes_no_weights(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller gets an error: the next step must go on from what the fleet serves."""
    worker = one_worker.trained(spec, controller, steps=2)
    before = one_worker.everything(worker)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Directory not empty"):
        patch.setattr("shutil.rmtree", MagicMock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
        worker.load_version(1)
    assert one_worker.equal(one_worker.everything(worker), before)
    worker.load_version(1)
    assert one_worker.equal(one_worker.everything(worker), one_worker.stored(spec, 1))
