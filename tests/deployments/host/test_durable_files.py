import threading
from pathlib import Path

import pytest

from deployments.host import durable_files


def test_a_file_is_flushed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, sync = threading.Event(), durable_files.sync

    def seen(path: Path) -> None:
        sync(path)
        flushed.set()

    monkeypatch.setattr(durable_files, "sync", seen)
    with durable_files.flushing(tmp_path), (tmp_path / "weights").open("wb") as file:
        file.write(b"some")
        assert flushed.wait(10), "the fsync at its end would delay every other one on this disk"
    flushed.clear()
    (tmp_path / "later").touch()
    assert not flushed.wait(0.1), "it ends with the block"
