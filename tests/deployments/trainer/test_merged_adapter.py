from dataclasses import replace
from pathlib import Path

import pytest

from deployments.trainer.spec import TrainerSpec, state_directory
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, MERGED, equal, lines, saved, started, stored, trained
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_models import save_tiny_llama

TRAINS = "merged"  # read by the fixture `spec`


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no checkpoint", "another alpha", "damaged", "without its base"])
def test_without_its_checkpoint_the_adapter_starts_from_zero_on_what_the_fleet_serves(
    spec: TrainerSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: str,
    controller: ControllerInProcess,
) -> None:
    if case == "no checkpoint":
        spec = with_config(spec, checkpoint_every=0)
    trained(spec, controller, steps=2)
    version = 2
    checkpoints = state_directory(spec.store_dir) / "checkpoints"
    if case == "another alpha":
        spec = with_config(spec, lora={**MERGED, "alpha": 9.0})
    elif case == "damaged":
        for file in checkpoints.glob("step-*/*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    elif case == "without its base":
        for file in checkpoints.glob("step-*/checkpoint.json"):
            file.write_text(file.read_text().replace('"base_version": 0', '"base_version": 7'))
    with caplog.at_level("WARNING", "ray.serve"):
        resumed = started(spec, controller)
    (line,) = lines(caplog)
    assert "step 2; the adapter starts from zero on it: moments start at zero: " in line
    assert equal(saved(resumed, tmp_path / "resumed"), stored(spec, version))
    metrics = resumed.step(BATCH)
    assert metrics["step"] == 3 and metrics["learning_rate"] == pytest.approx(1e-3 * 3 / 5)
    assert not equal(saved(resumed, tmp_path / "a step on"), stored(spec, version))


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["base", "penalty"])
def test_a_model_that_was_overwritten_is_neither_base_nor_reference(
    spec: TrainerSpec, controller: ControllerInProcess, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial, fleet = InitialCheckpoint(spec.model).check(None), TrainerWorker._fleet
    monkeypatch.setattr(TrainerWorker, "_fleet", lambda self: replace(fleet(self), initial=initial))
    if reader == "penalty":
        loss = {**spec.config.loss.model_dump(), "kl_coefficient": 0.1}
        spec = with_config(spec, lora=None, loss=loss)
    trained(spec, controller, steps=1)
    save_tiny_llama(Path(spec.model), seed=3, tied=True)
    with pytest.raises(ValueError, match=r"version 0 of this fleet is digest .*: restore it"):
        started(spec, controller)


@pytest.mark.slow
def test_a_trainer_of_all_weights_takes_no_checkpoint_of_an_adapter(
    spec: TrainerSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    trained(spec, controller, steps=1)
    with caplog.at_level("WARNING", "ray.serve"):
        resumed = started(with_config(spec, lora=None), controller)
    (line,) = lines(caplog)
    assert "moments start at zero" in line
    assert equal(saved(resumed, tmp_path / "resumed"), stored(spec, 1))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rollback", "no checkpoint"])
def test_the_penalty_compares_with_the_model_when_the_base_is_another(
    spec: TrainerSpec, case: str, controller: ControllerInProcess
) -> None:
    loss = {**spec.config.loss.model_dump(), "kl_coefficient": 10.0}
    spec = with_config(spec, loss=loss, optimizer={"learning_rate": 0.01})
    worker = trained(with_config(spec, checkpoint_every=0), controller, steps=1)
    expected = worker.step(BATCH)["loss"]  # of version 1, compared with version 0
    if case == "rollback":
        worker.load_version(1)
    else:
        worker = started(spec, controller)
    assert worker.step(BATCH)["loss"] == pytest.approx(expected, rel=1e-3)
