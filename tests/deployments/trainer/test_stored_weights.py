"""What a trainer begins from whose host has a store of its own."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import StoredVersion
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.host_store import HostStore
from deployments.trainer import stored_weights
from deployments.trainer.stored_weights import Found, StoredWeights
from deployments.weights.store.versions import Store
from tests.deployments.version_holder import FLEET, VERSION, WEIGHTS, holder, told, write
from tests.two_ranks import TIMEOUT_S, both, grouped


class Host:
    """A trainer's, and what the controller says: `holders` one after the other, the last ones for good."""

    def __init__(self, directory: Path, committed: Path, *holders: Sequence[ReplicaEndpoint]) -> None:
        self.store = Store(directory)
        self._committed = committed
        self._holders = list(holders)
        self._stored = StoredWeights(self.store, 0, self._told, shared=False)

    async def find(self) -> Found:
        fleet: Any = SimpleNamespace(committed_version=VERSION, store_problem=None)
        return await asyncio.wait_for(asyncio.to_thread(self._stored.find, lambda: fleet), 30)

    def _told(self, version: int, path: str) -> StoredVersion:
        if version != VERSION:
            return StoredVersion(version=version, path=path, fleet_id=FLEET)
        holders = self._holders.pop(0) if len(self._holders) > 1 else self._holders[0]
        return told(self.store.directory, self._committed, *holders)


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RETRY_S", 0.01), ("QUIET_S", 0.0), ("HOLDER_WAIT_S", 20.0)):
        monkeypatch.setattr(stored_weights, name, value)


FOUND = Found(version=VERSION, committed=VERSION, problem="")


async def test_the_committed_version_is_taken_from_a_replica_once_one_runs(tmp_path: Path) -> None:
    write(tmp_path / "a")
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        host = Host(tmp_path / "b", tmp_path / "a", (), (), (peer,))
        assert await host.find() == FOUND
    assert await Host(tmp_path / "b", tmp_path / "a", ()).find() == FOUND  # nobody serves it any more


async def test_a_damaged_version_is_replaced_by_that_of_a_replica_once_one_runs(tmp_path: Path) -> None:
    write(tmp_path / "a")
    file = write(tmp_path / "b") / WEIGHTS
    good = file.read_bytes()
    damage(file)
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        assert await Host(tmp_path / "b", tmp_path / "a", (), (peer,)).find() == FOUND
    assert file.read_bytes() == good


async def test_a_replica_that_dies_while_it_gives_the_version_is_not_the_last_one(tmp_path: Path) -> None:
    """The others of a fleet that starts come a little later."""
    write(tmp_path / "a")
    async with holder(HostStore(tmp_path / "a", 3)) as dead:
        pass
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        assert await Host(tmp_path / "b", tmp_path / "a", (dead,), (dead, peer)).find() == FOUND


async def test_why_the_committed_version_is_not_there_is_said_beside_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "HOLDER_WAIT_S", 0.0)
    write(tmp_path / "a")
    damage(write(tmp_path / "b", version=VERSION - 1) / WEIGHTS)
    write(tmp_path / "b", version=VERSION - 2)
    found = await Host(tmp_path / "b", tmp_path / "a", ()).find()
    assert found.version == VERSION - 2
    assert "version 7 must be in" in found.problem and "version 6 in" in found.problem


async def test_what_was_not_committed_is_not_begun_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version before it is, of this host's own store."""
    monkeypatch.setattr(stored_weights, "HOLDER_WAIT_S", 0.0)
    write(tmp_path / "a")
    write(tmp_path / "other", {"w": torch.zeros(3)})
    write(tmp_path / "b", version=VERSION - 1)
    async with holder(HostStore(tmp_path / "other", 3)) as peer:
        host = Host(tmp_path / "b", tmp_path / "a", (peer,))
        found = await host.find()
    assert (found.version, found.committed) == (VERSION - 1, VERSION)
    assert "as it was committed, with digest" in found.problem
    assert host.store.list() == [VERSION - 1]


async def test_without_a_replica_it_says_so_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "HOLDER_WAIT_S", 0.0)
    write(tmp_path / "a")
    found = await Host(tmp_path / "b", tmp_path / "a", ()).find()
    assert found == Found(
        version=0,
        committed=VERSION,
        problem=f"version 7 must be in {tmp_path / 'b' / 'v00000007'}, and there is none; once a replica "
        "gives it, POST /fleet/rollback with version 7 loads it",
    )


def _rank_without_a_controller(rank: int, directory: Path) -> None:
    def told(version: int, path: str) -> StoredVersion:
        raise FleetUnavailable("the controller restarts")

    with grouped(rank, directory):
        weights = StoredWeights(Store(directory / "store"), rank, told, shared=True)
        began = time.monotonic()
        for ask in (
            lambda: weights.problem(3),
            lambda: weights.find(lambda: SimpleNamespace(committed_version=3)),
        ):
            with pytest.raises(FleetUnavailable, match=r"^the controller restarts$"):
                ask()
        assert time.monotonic() - began < TIMEOUT_S / 2


@pytest.mark.slow
def test_ranks_learn_that_the_controller_does_not_answer(tmp_path: Path) -> None:
    """Else they wait for rank 0, and the trainer is restarted without the steps that it has not published."""
    both(_rank_without_a_controller, tmp_path)
