"""A trainer of an adapter that is started again: what it goes on from."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from deployments.trainer.adapter_worker import AdapterWorker
from deployments.trainer.spec import LoadedTrainer, TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_adapter import (
    TENSORS,
    adapter_spec,
    checkpoints,
    lora,
    published,
    saved,
    started,
    trained,
)
from tests.deployments.trainer.one_worker import BATCH, equal, lines
from tests.deployments.trainer.trainer_specs import with_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return adapter_spec(tmp_path)


def test_a_restarted_trainer_continues_exactly(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    spec = with_config(spec, wire_dtype="bfloat16")
    straight = trained(spec, controller)
    resumed = AdapterWorker(spec, 0, controller)  # type: ignore[arg-type]
    parameters = sum(tensor.numel() for tensor in saved(straight, tmp_path / "straight").values())
    assert resumed.load(("", 0)) == LoadedTrainer(version=0, step=2, parameters=parameters, adapter_version=2)
    assert equal(saved(resumed, tmp_path / "resumed"), load_file(tmp_path / "straight" / TENSORS))
    assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert equal(saved(resumed, tmp_path / "r"), saved(straight, tmp_path / "s"))
    assert published(resumed).version == 3


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
        spec = replace(adapter_spec(tmp_path), store_dir=str(tmp_path / "shared" / run))
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


@pytest.mark.slow
def test_an_adapter_is_not_continued_with_other_settings(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    trained(spec, controller, 1)
    with pytest.raises(ValueError, match="version 1 of the adapter is live, and is not one of this trainer"):
        started(with_config(spec, lora=lora(alpha=4)), controller)
    controller.ask("unload_adapter", "math")
    other = lora(rank=2)
    with pytest.raises(ValueError, match="is of another adapter: 'rank' must be 2, got 4; choose another"):
        started(with_config(spec, lora=other), controller)
    named = started(with_config(spec, lora=other | {"name": "code"}), controller)
    assert published(named).version == 1 and controller.live == ["code@1"]
