"""What a trainer loads from the store is what was written there."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from deployments.protocol.errors import InvalidRequest
from deployments.trainer.spec import TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, equal, published, small_spec, started


@pytest.fixture
def spec(tmp_path: Path, controller: ControllerInProcess) -> TrainerSpec:
    """With versions 1 and 2 in its store."""
    spec = small_spec(tmp_path)
    worker = started(spec, controller)
    for _ in range(2):
        worker.step(BATCH)
        published(worker)
        assert worker.flush(30.0)
    return spec


def damage(spec: TrainerSpec, version: int) -> None:
    """One byte, as a disk loses it."""
    file = Path(spec.store_dir) / f"v{version:08d}" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def test_a_damaged_version_is_not_resumed_from_and_the_one_before_is(
    spec: TrainerSpec, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    damage(spec, 2)
    worker = started(spec, controller)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert sum("resumes from version 1, and what was trained since is lost" in each for each in warnings) == 1
    assert any("version 2 in" in each and "is damaged" in each for each in warnings)
    published(worker)
    assert equal(controller.received, load_file(controller.directory_of(1) / "model.safetensors"))


def test_a_trainer_does_not_start_where_every_version_is_damaged(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    damage(spec, 1)
    damage(spec, 2)
    with pytest.raises(ValueError, match=r"no version in .* can be used: version 2 .*; version 1"):
        started(spec, controller)


@pytest.mark.slow
def test_a_rollback_to_a_damaged_version_is_refused_and_changes_nothing(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    published(worker)
    before = {name: tensor.clone() for name, tensor in controller.received.items()}
    damage(spec, 1)
    with pytest.raises(InvalidRequest, match=r"version 1 is not loaded: version 1 in .* is damaged"):
        worker.load_version(1)
    published(worker)
    assert equal(controller.received, before)
    damage(spec, 1)
    worker.load_version(1)
    published(worker)
    assert not equal(controller.received, before)
