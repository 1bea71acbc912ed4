"""One rank that trains an adapter, without Ray and without a fleet: what is published."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deployments.protocol.adapters import LoadAdapter, LoadRequest
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.poll import Outcome
from deployments.trainer.adapter_worker import AdapterWorker
from deployments.trainer.spec import LoadedTrainer, TrainerSpec, adapter_directory
from deployments.weights.store.adapter_store import adapter_digest
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from tests.deployments.controller_in_process import ControllerInProcess, Fate
from tests.deployments.trainer.one_adapter import (
    TENSORS,
    checkpoints,
    live_files,
    published,
    saved,
    started,
    trained,
)
from tests.deployments.trainer.one_worker import ADAPTER, BATCH, equal, lines, spec_of
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_adapters import save_tiny_adapter

TRAINS = "adapter"  # read by the fixture `spec`

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # optimizer steps


def test_what_is_published_is_the_adapter_alone(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    left = adapter_directory(spec.store_dir) / ".step-000001.partial"
    left.mkdir(parents=True)
    worker = started(spec, controller)
    assert not left.exists(), "a killed trainer's"
    assert worker.step(BATCH)["step"] == 1
    report = published(worker, "first")
    assert (report.name, report.version, report.label, report.step) == ("math", 1, "first", 1)
    assert (report.base_version, controller.status.committed_version) == (0, 0), "the base stays"
    assert controller.live == ["math@1"]
    (files,) = live_files(controller)
    assert equal(load_file(files / TENSORS), saved(worker, tmp_path / "saved"))
    assert "open_round" not in controller.calls and controller.status.lease is None, (
        "no round, and others may publish"
    )
    assert not list(adapter_directory(spec.store_dir).iterdir()), "the fleet has its own names for them"
    assert report.digest == adapter_digest(files)
    assert not list(Path(spec.store_dir).glob("v*")), "the base is not stored again"
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj", "v_proj"])


@pytest.mark.parametrize("method", ["load_adapter", "adapters", "fleet"])
def test_a_publish_survives_a_controller_that_dies_in_any_of_its_calls(
    spec: TrainerSpec, controller: ControllerInProcess, method: str
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    fates: tuple[Fate, ...] = ("before", "after")
    for version, fate in enumerate(fates, start=1):
        controller.dies_in[method] = fate
        assert published(worker).version == version and controller.live[-1] == f"math@{version}", fate


def test_a_name_that_others_loaded_is_not_replaced(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = trained(spec, controller, 1)
    foreign = save_tiny_adapter(tmp_path / "state" / "users" / "a", 1)
    controller.ask("load_adapter", LoadRequest(name="math", path=str(foreign), in_place=True))
    with caplog.at_level("WARNING", "ray.serve"):
        restarted = started(spec, controller)
    assert any(each.startswith("math@2 was not published by this trainer") for each in lines(caplog))
    for each in (worker, restarted):
        with pytest.raises(Conflict, match="math@2 was not published by this fleet's trainer: unload it"):
            each.publish(None)
    assert controller.live == ["math@1", "math@2"]
    controller.ask("unload_adapter", "math@2")
    assert published(worker).version == 3


def test_what_the_replicas_reject_is_an_error_and_leaves_nothing(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = trained(spec, controller, 1)
    controller.replica.outcomes[LoadAdapter] = Outcome.REJECTED
    with pytest.raises(InvalidRequest, match="rejected here"):
        worker.publish(None)
    controller.replica.outcomes.clear()
    assert controller.live == ["math@1"]
    assert not list(adapter_directory(spec.store_dir).iterdir())
    assert published(worker).version == 3


def test_a_full_disk_is_an_error_and_the_fleet_stays_as_it_was(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = trained(spec, controller, 1)
    directory = adapter_directory(spec.store_dir)
    directory.rmdir()
    directory.write_text("a file where the directory was to be")
    with pytest.raises(Conflict, match=r"the adapter 'math' is not published: .*Not a directory"):
        worker.publish(None)
    assert controller.live == ["math@1"]
    directory.unlink()
    assert published(worker).version == 2


def test_an_adapter_of_another_base_is_not_published(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = trained(spec, controller, 1)
    controller.publish_as("somebody else")
    with pytest.raises(Conflict, match="was trained on version 0, and the fleet serves version 1"):
        worker.publish(None)
    assert controller.live == ["math@1"]


def test_an_adapter_is_saved_in_the_store_by_default(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(with_config(spec, checkpoint_every=0), controller)
    report = worker.save(None)
    assert report is not None, "rank 0 has the report"
    path = Path(report.path)
    assert path.parent == Path(spec.store_dir) and path.name.endswith("-000000")
    late = AdapterWorker(spec, 1, controller)  # type: ignore[arg-type]
    assert late.save(str(path)) is None, "rank 0's files are no reason to refuse"


# -- a trainer of an adapter that is started again: what it goes on from ---------------------------


def test_a_restarted_trainer_continues_exactly(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    spec = with_config(spec, wire_dtype="bfloat16")
    straight = trained(spec, controller)
    resumed = AdapterWorker(spec, 0, controller)  # type: ignore[arg-type]
    parameters = sum(tensor.numel() for tensor in saved(straight, tmp_path / "straight").values())
    assert resumed.load(("", 0)) == LoadedTrainer(
        version=0,
        step=2,
        parameters=parameters,
        adapter_version=2,
        initial=InitialCheckpoint(spec.model).check(None),
    )
    assert equal(saved(resumed, tmp_path / "resumed"), load_file(tmp_path / "straight" / TENSORS))
    assert resumed.step(BATCH, label="run/3") | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert equal(saved(resumed, tmp_path / "r"), saved(straight, tmp_path / "s"))
    assert published(resumed, "run/3").version == 3
    assert AdapterWorker(spec, 0, controller).load(("", 0)).labels == ("run/3",)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["not saved", "damaged"])
def test_a_lost_checkpoint_costs_moments_and_not_weights(
    spec: TrainerSpec,
    controller: ControllerInProcess,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    worker = trained(spec, controller, 1)
    worker.step(BATCH)
    published(worker)
    if fault == "damaged":
        worker.save_checkpoint()
        assert worker.flush(30.0)
        next(checkpoints(spec)[-1].glob("*.distcp")).write_bytes(b"")
    with caplog.at_level("INFO", "ray.serve"):
        resumed = started(spec, controller)
    assert lines(caplog)[-1] == (
        "the trainer trains the adapter 'math', step 2; weights as stored, moments of step 1"
    )
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "before"))
    assert resumed.step(BATCH)["step"] == 3


def test_a_run_takes_nothing_from_a_run_whose_store_is_beside_its_own(tmp_path: Path) -> None:
    """As on a shared disk: all stores are in one directory."""
    (tmp_path / "shared").mkdir()
    for run in ("one", "two"):
        (tmp_path / "shared" / run).symlink_to(tmp_path / run / "store")
        controller = ControllerInProcess(tmp_path / run)
        spec = replace(spec_of(tmp_path, "adapter"), store_dir=str(tmp_path / "shared" / run))
        assert started(spec, controller)._learner.steps_done == 0
        left = sorted((tmp_path / "one").rglob("step-*"))
        trained(spec, controller, 1).save(None)
        controller.close()
    assert left and sorted((tmp_path / "one").rglob("step-*")) == left
    assert sorted(each.name for each in (tmp_path / "shared").iterdir()) == ["one", "two"]


def test_nothing_is_resumed_once_the_store_is_moved_away(spec: TrainerSpec, tmp_path: Path) -> None:
    """What users do to start anew; a user who keeps the journal has to unload the adapter, too."""
    controller = ControllerInProcess(tmp_path / "state")
    trained(spec, controller)
    controller.close()
    Path(spec.store_dir).rename(tmp_path / "away")
    controller = ControllerInProcess(tmp_path / "state")
    assert started(spec, controller)._learner.steps_done == 0
    controller.close()


def test_a_damaged_checkpoint_leaves_the_one_before_where_the_adapter_is_not_live(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    trained(spec, controller)
    controller.ask("unload_adapter", "math")
    older, newest = checkpoints(spec)
    for damaged, step in ((newest, 2), (older, 1)):
        next(damaged.glob("*.distcp")).write_bytes(b"")
        assert started(spec, controller).step(BATCH)["step"] == step


def test_an_unloaded_adapter_is_published_again_from_where_it_was(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    trained(spec, controller)
    controller.ask("unload_adapter", "math")
    resumed = started(spec, controller)
    report = published(resumed)
    assert (report.version, report.step) == (3, 2) and controller.live == ["math@3"]


def test_an_adapter_is_not_continued_with_other_settings(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    trained(spec, controller, 1)
    with pytest.raises(ValueError, match="version 1 of the adapter is live, and is not one of this trainer"):
        started(with_config(spec, lora=ADAPTER | {"alpha": 4}), controller)
    controller.ask("unload_adapter", "math")
    other = ADAPTER | {"rank": 2}
    with pytest.raises(ValueError, match="is of another adapter: 'rank' must be 2, got 4; choose another"):
        started(with_config(spec, lora=other), controller)
    named = started(with_config(spec, lora=other | {"name": "code"}), controller)
    assert published(named).version == 1 and controller.live == ["code@1"]
