from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.trainer.spec import TrainerSpec, state_directory
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import (
    BATCH,
    equal,
    go_on,
    lines,
    published,
    saved,
    small_spec,
    started,
    trained,
)
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_models import save_tiny_llama

LORA = {"publish": "merged", "rank": 4, "alpha": 8.0}


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return with_config(small_spec(tmp_path), lora=LORA)


def stored(spec: TrainerSpec, version: int) -> dict[str, torch.Tensor]:
    (path,) = Path(spec.store_dir).glob(f"v*{version}/model.safetensors")
    return load_file(path)


@pytest.mark.slow
def test_what_is_published_and_stored_and_saved_is_the_sum(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    model = load_file(Path(spec.model) / "model.safetensors")
    worker.publish("before the first step")
    assert equal(controller.received, model), "the adapter begins with nothing"
    worker.step(BATCH)
    worker.publish(None)
    assert worker.flush(30.0)
    sent = dict(controller.received)
    changed = {name for name in model if not torch.equal(sent[name], model[name])}
    assert sent.keys() == model.keys() and changed == {name for name in model if "proj" in name}
    assert equal(stored(spec, 2), sent) and equal(saved(worker, tmp_path / "saved"), sent)


@pytest.mark.slow
def test_a_restarted_trainer_is_exactly_where_it_was(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    straight = trained(spec, controller, steps=2)
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(straight, tmp_path / "straight"))
    for _ in range(2):
        assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert equal(saved(resumed, tmp_path / "resumed on"), saved(straight, tmp_path / "straight on"))


@pytest.mark.slow
def test_master_weights_of_the_adapter_survive_though_sums_are_published_rounded(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    spec = with_config(spec, wire_dtype="bfloat16")
    before = saved(trained(spec, controller, steps=2), tmp_path / "before")
    assert equal(saved(started(spec, controller), tmp_path / "after"), before)


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
        spec = with_config(spec, lora={**LORA, "alpha": 9.0})
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
def test_the_base_may_be_a_stored_version(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    trained(with_config(spec, checkpoint_every=0), controller, steps=1)
    straight = started(spec, controller)
    go_on(straight, 2)
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(straight, tmp_path / "straight"))
    assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}


@pytest.mark.slow
def test_a_rollback_makes_the_old_version_the_base(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    go_on(worker, 2)
    worker.load_version(1)
    assert published(worker, "rollback to 1").version == 3
    assert equal(controller.received, stored(spec, 1))
    go_on(worker, 1)
    assert equal(saved(started(spec, controller), tmp_path / "a"), saved(worker, tmp_path / "b"))


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
def test_the_penalty_compares_with_the_model_whatever_the_base_is(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    spec = with_config(spec, loss={**spec.config.loss.model_dump(), "kl_coefficient": 0.1})
    worker = trained(with_config(spec, checkpoint_every=0), controller, steps=2)
    first = worker.step(BATCH)
    resumed = started(spec, controller)
    again = resumed.step(BATCH)
    kl = [name for name in first if "kl" in name]
    assert kl and all(again[name] == pytest.approx(first[name], rel=1e-3) for name in kl)
    assert all(first[name] != 0 for name in kl)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rollback", "damaged"])
def test_the_penalty_compares_with_the_model_when_the_base_becomes_another(
    spec: TrainerSpec, case: str, controller: ControllerInProcess
) -> None:
    spec = with_config(spec, loss={**spec.config.loss.model_dump(), "kl_coefficient": 0.1})
    worker = trained(spec, controller, steps=2)
    if case == "rollback":
        worker.load_version(1)
    else:
        for file in (state_directory(spec.store_dir) / "checkpoints").glob("step-*/*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
        worker = started(spec, controller)
    metrics = worker.step(BATCH)  # of a policy that is two steps from the model, or one
    kl = [name for name in metrics if "kl" in name]
    assert kl and all(metrics[name] != 0 for name in kl)
