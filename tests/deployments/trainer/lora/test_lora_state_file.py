"""The state of an adapter's training on disk."""

import os
from pathlib import Path

import pytest
import torch

from deployments.trainer.lora.state_file import StateFile


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
    assert synced == [str(file.path.with_suffix(".partial")), str(file.path.parent)]
    assert file.read() == {"steps_done": 4}
    file.remove()
    file.remove()
    with pytest.raises(FileNotFoundError):
        file.read()


def test_a_full_disk_leaves_the_former_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path, 0)
    file.write({"steps_done": 4}, 4)
    file.path.with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        file.write({"steps_done": 5, "weights": torch.zeros(1 << 20)}, 5)
    assert file.read() == {"steps_done": 4}
    assert [entry.name for entry in tmp_path.iterdir()] == [file.path.name]
