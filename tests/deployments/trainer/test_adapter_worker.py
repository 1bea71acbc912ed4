"""One rank that trains an adapter, without Ray and without a fleet: what is published."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from deployments.protocol.adapters import LoadAdapter
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.poll import Outcome
from deployments.trainer.adapter_worker import AdapterWorker
from deployments.trainer.spec import TrainerSpec, adapter_directory
from deployments.weights.store.adapter_store import adapter_digest
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_adapter import (
    TENSORS,
    adapter_spec,
    live_files,
    published,
    saved,
    started,
    trained,
)
from tests.deployments.trainer.one_worker import BATCH, equal, lines
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_adapters import save_tiny_adapter

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return adapter_spec(tmp_path)


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


@pytest.mark.parametrize("fate", ["before", "after"])
@pytest.mark.parametrize("method", ["load_adapter", "adapters", "fleet"])
def test_a_publish_survives_a_controller_that_dies_in_any_of_its_calls(
    spec: TrainerSpec, controller: ControllerInProcess, method: str, fate: Any
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    controller.dies_in[method] = fate
    report = published(worker)
    assert report.version == 1 and controller.live == ["math@1"]


def test_a_name_that_others_loaded_is_not_replaced(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = trained(spec, controller, 1)
    foreign = save_tiny_adapter(tmp_path / "state" / "users" / "a", 1)
    controller.ask("load_adapter", "math", str(foreign), True)
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


def test_an_adapter_is_saved_in_the_store_and_not_just_anywhere(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(with_config(spec, checkpoint_every=0), controller)
    report = worker.save(None)
    assert report is not None, "rank 0 has the report"
    path = Path(report.path)
    assert path.parent == Path(spec.store_dir) and path.name.endswith("-000000")
    late = AdapterWorker(spec, 1, controller)  # type: ignore[arg-type]
    assert late.save(str(path)) is None, "rank 0's files are no reason to refuse"
    for wrong in ("relative", "/proc/1/x/y"):
        with pytest.raises(InvalidRequest, match="path must be"):
            worker.save(wrong)
