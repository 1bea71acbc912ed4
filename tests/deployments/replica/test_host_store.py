"""The store of one host, as its replicas use it."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from deployments.protocol.errors import JournalError
from deployments.protocol.poll import WriteVersion
from deployments.replica.host_store import HostStore
from deployments.weights.store.versions import Store
from tests.deployments.version_holder import FLEET, VERSION, write
from tests.full_disk import full_disk


def test_one_replica_of_a_host_writes_and_removes(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "store", 2)
    lock = store.lock(FLEET)
    assert lock is not None and store.lock(FLEET) is None
    os.close(lock)
    for version in (3, 4, 5):
        write(tmp_path / "store", {"a": torch.ones(1)}, version)
    for version in (1, 8, 9):  # copied by an operator
        write(tmp_path / "others", {"a": torch.ones(1)}, version, "another-fleet").rename(
            tmp_path / "store" / f"v{version:08d}"
        )
    lock = store.lock(FLEET)
    assert lock is not None and Store(tmp_path / "store").list() == [1, 4, 5, 8, 9]
    os.close(lock)
    with pytest.raises(JournalError, match="belongs to fleet another-fleet"):
        HostStore(tmp_path / "others", 2).lock(FLEET)


@pytest.mark.parametrize("problem", [errno.ENOENT, errno.EIO, errno.ENOLCK], ids=os.strerror)
def test_old_versions_that_cannot_be_removed_delay_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """The controller of this host was first, the disk fails, or its file system has no locks."""
    for version in (3, 4, 5, 6):
        write(tmp_path, {"a": torch.ones(1)}, version)
    error = OSError(problem, os.strerror(problem))
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", MagicMock(side_effect=error))
        lock = HostStore(tmp_path, 2).lock(FLEET)
    assert lock is not None and Store(tmp_path).list() == [3, 4, 5, 6]
    os.close(lock)


def test_a_version_that_filled_the_disk_is_stored_all_the_same(tmp_path: Path) -> None:
    """Without a note of it: another replica finds the version itself when it writes."""
    store = HostStore(tmp_path, 3)
    wanted = WriteVersion(version=VERSION, label=None, fleet_id=FLEET, digest="d" * 32)
    lock = store.lock(FLEET)
    assert lock is not None
    with full_disk():
        store.unlock(lock, wanted)
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) is None
    os.close(lock)


def test_a_file_system_without_locks_has_several_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", MagicMock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    locks = [HostStore(tmp_path, 2).lock(FLEET) for _ in range(2)]
    assert None not in locks
    for lock in locks:
        os.close(lock or 0)


def test_the_version_that_was_written_last_is_known_to_other_replicas(tmp_path: Path) -> None:
    store = HostStore(tmp_path, 3)
    wanted = WriteVersion(version=VERSION, label=None, fleet_id=FLEET, digest="d" * 32)
    for written in (None, wanted, None):
        lock = store.lock(FLEET)
        assert lock is not None
        store.unlock(lock, written)
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) == str(Store(tmp_path).path(VERSION))
    for other in ({"digest": "x"}, {"fleet_id": "x"}, {"version": 77}):
        assert store.find(replace(wanted, **other)) is None  # type: ignore[arg-type]
    store.unlock(lock, replace(wanted, version=8, digest=None))
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) is None
    os.close(lock)
