"""What the trainer's model lacks is stored as the fleet has it: another publisher may have changed it."""

from pathlib import Path

import pytest
import torch

from deployments.errors import InvalidRequest
from deployments.protocol.publishing import LACKING
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import equal, published, started
from tests.deployments.trainer.test_checkpoint import spec_of, tensors_of
from tests.tiny_models import save_tiny_mtp

TIMEOUT_S = 30.0


class Fleet:
    """A trainer whose model lacks the layers of multi-token prediction, and a publisher that has them."""

    def __init__(self, tmp_path: Path, controller: ControllerInProcess) -> None:
        self.controller = controller
        model = save_tiny_mtp(tmp_path / "model", 0)
        spec = spec_of(model, tmp_path)
        self.store = Store(Path(spec.store_dir))
        self.changed = {name: tensor + 1.0 for name, tensor in tensors_of(model).items()}
        self.trainer: TrainerWorker = started(spec, self.controller)
        self.publish()

    def publish(self) -> int:
        """By the trainer; its number."""
        report = published(self.trainer)
        assert self.trainer.flush(TIMEOUT_S)
        return report.version

    def publish_changed(self, *, stored: bool) -> None:
        """By the other one."""
        report = self.controller.publish_as("another")
        if stored:
            self.write(report.version)

    def write(self, version: int) -> None:
        committed = CommittedVersion(version=version, label=None, tensors=self.changed)
        write_version(committed, self.store, lambda directory: None)

    def lacking_of(self, version: int) -> dict[str, torch.Tensor]:
        tensors = tensors_of(self.controller.directory_of(version))
        return {name: tensors[name] for name in self.controller.last["connect"][1][LACKING]}

    def saved(self, directory: Path) -> dict[str, torch.Tensor]:
        """What the trainer lacks, in a checkpoint that it writes."""
        self.trainer.save(str(directory))
        tensors = tensors_of(directory)
        return {name: tensors[name] for name in self.controller.last["connect"][1][LACKING]}

    def as_changed(self) -> dict[str, torch.Tensor]:
        return {name: self.changed[name] for name in self.controller.last["connect"][1][LACKING]}


@pytest.fixture
def fleet(tmp_path: Path, controller: ControllerInProcess) -> Fleet:
    return Fleet(tmp_path, controller)


def test_a_version_has_what_another_publisher_changed_before_it(fleet: Fleet) -> None:
    assert not equal(fleet.lacking_of(1), fleet.as_changed())
    fleet.publish_changed(stored=True)
    assert fleet.publish() == 3
    assert equal(fleet.lacking_of(3), fleet.as_changed())


@pytest.mark.slow
def test_a_saved_checkpoint_has_what_another_publisher_changed(fleet: Fleet, tmp_path: Path) -> None:
    before = fleet.saved(tmp_path / "before")
    assert equal(before, fleet.lacking_of(1)) and before
    fleet.publish_changed(stored=True)
    assert equal(fleet.saved(tmp_path / "after"), fleet.as_changed())
    fleet.publish()
    assert equal(fleet.saved(tmp_path / "later"), fleet.as_changed())


def test_nothing_is_saved_with_tensors_that_the_fleet_does_not_serve(fleet: Fleet, tmp_path: Path) -> None:
    fleet.publish_changed(stored=False)
    fleet.publish()
    reason = r"^the checkpoint cannot be completed: .* of version 2, and neither that nor a later one is in"
    with pytest.raises(InvalidRequest, match=reason):
        fleet.saved(tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*"))


def test_while_the_changed_version_is_not_stored_no_later_one_is(fleet: Fleet) -> None:
    fleet.publish_changed(stored=False)
    assert fleet.publish() == 3
    problem = fleet.trainer.store_status().store_problem
    assert problem is not None and "they are those of version 2, which is not in" in problem
    assert fleet.controller.status.store_problem == problem
    fleet.write(2)
    assert fleet.publish() == 4
    assert fleet.controller.status.stored_version == 4
    assert equal(fleet.lacking_of(4), fleet.as_changed())
