"""A trainer of an adapter that is started again: what it goes on from."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.protocol.adapters import LoadAdapter
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.poll import Outcome
from deployments.trainer.lora.resume import StateFile
from deployments.trainer.lora.worker import LoraWorker
from deployments.trainer.spec import LoadedTrainer, TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.lora.one_adapter import (
    TENSORS,
    lora,
    published,
    saved,
    started,
    state_file,
    trained,
)
from tests.deployments.trainer.one_worker import BATCH, equal, lines
from tests.deployments.trainer.trainer_specs import with_config

pytestmark = pytest.mark.timeout(300)


def test_a_restarted_trainer_goes_on_exactly(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    spec = with_config(spec, wire_dtype="bfloat16")
    straight = trained(spec, controller)
    resumed = LoraWorker(spec, 0, controller)  # type: ignore[arg-type]
    parameters = sum(tensor.numel() for tensor in saved(straight, tmp_path / "straight").values())
    assert resumed.load(("", 0)) == LoadedTrainer(version=0, step=2, parameters=parameters, adapter_version=2)
    assert equal(saved(resumed, tmp_path / "resumed"), load_file(tmp_path / "straight" / TENSORS))
    assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert equal(saved(resumed, tmp_path / "r"), saved(straight, tmp_path / "s"))
    assert published(resumed).version == 3


def test_a_trainer_that_was_lost_before_the_fleet_had_its_adapter_goes_on_with_it(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    worker = trained(spec, controller, 1)
    worker.step(BATCH)
    controller.replica.outcomes[LoadAdapter] = Outcome.REJECTED
    with pytest.raises(InvalidRequest):
        worker.publish(None)
    controller.replica.outcomes.clear()
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "lost"))
    assert published(resumed).step == 2 and controller.live[0] == "math@1"


def test_a_state_that_was_not_written_costs_the_moments_and_not_the_weights(
    spec: TrainerSpec,
    controller: ControllerInProcess,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = trained(spec, controller, 1)
    state_file(spec).with_name(".trainer_state.rank0.pt.partial").symlink_to("/dev/full")
    worker.step(BATCH)
    with caplog.at_level("INFO", "ray.serve"):
        assert published(worker).version == 2
        resumed = started(spec, controller)
    first, second = lines(caplog)[-2:]
    assert first.startswith("the state of the adapter 'math' at step 2 is not saved")
    assert second == (
        "the trainer trains the adapter 'math', from step 2; weights as published, moments of step 1"
    )
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "before"))


@pytest.mark.parametrize("damage", [b"", b"not a state"])
def test_a_damaged_state_costs_the_moments_and_not_the_weights(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path, damage: bytes
) -> None:
    worker = trained(spec, controller, 2)
    state_file(spec).write_bytes(damage)
    resumed = started(spec, controller)
    assert equal(saved(resumed, tmp_path / "resumed"), saved(worker, tmp_path / "before"))
    assert resumed.step(BATCH)["step"] == 3


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
    with pytest.raises(ValueError, match=r"is the state of another adapter: .*choose another 'trainer.lora"):
        started(with_config(spec, lora=lora(rank=2)), controller)
    with pytest.raises(ValueError, match=r"'alpha' must be 4\.0, got 8\.0"):
        started(with_config(spec, lora=lora(alpha=4)), controller)
    state_file(spec).unlink()
    with pytest.raises(
        ValueError, match="version 1 of the adapter is live, and is not one of this trainer's"
    ):
        started(with_config(spec, lora=lora(alpha=4)), controller)
    other = started(with_config(spec, lora=lora(rank=2, name="code")), controller)
    assert published(other).version == 1 and controller.live == ["math@1", "code@1"]


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def recorded(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if Path(path).is_relative_to(tmp_path):  # an earlier test's store may still be written
            synced.append(path)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    file = StateFile(tmp_path / "trainer", 1)
    file.write({"steps_done": 4}, 4)
    assert file.path == tmp_path / "trainer" / "trainer_state.rank1.pt"
    assert synced == [str(file.path.with_name(".trainer_state.rank1.pt.partial")), str(file.path.parent)]
    assert file.read() == {"steps_done": 4}
    file.remove()
    file.remove()
    with pytest.raises(FileNotFoundError):
        file.read()


def test_a_full_disk_leaves_the_former_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path, 0)
    file.write({"steps_done": 4}, 4)
    file.path.with_name(".trainer_state.rank0.pt.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        file.write({"steps_done": 5, "weights": torch.zeros(1 << 20)}, 5)
    assert file.read() == {"steps_done": 4}
    assert [entry.name for entry in tmp_path.iterdir()] == [file.path.name]
