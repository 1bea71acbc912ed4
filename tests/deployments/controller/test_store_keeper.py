"""The controller removes the versions that nobody needs, and no others; and it keeps out another fleet's."""

import asyncio
from pathlib import Path

import pytest

from deployments.controller.store_keeper import StoreKeeper
from deployments.ledger.decisions import Decision, Stored
from deployments.ledger.ledger import Ledger
from deployments.protocol.errors import InvalidRequest, JournalError
from deployments.weights.store.versions import MANIFEST, Store, VersionManifest
from tests.deployments.controller.fleet import Fleet, publish

OURS = "fleet"
HERE = Path(__file__).parent


def write(store: Store, version: int, fleet_id: str | None = OURS) -> None:
    with store.writing(VersionManifest(version=version, fleet_id=fleet_id, tensors={})):
        pass


def keeper(store: Store, *decisions: Decision, keep: int = 1, stored: int = 0) -> StoreKeeper:
    """Of a fleet whose journal has these decisions."""
    ledger = Ledger()
    newest = [Stored(version=stored, path="", label=None)] if stored else []
    ledger.recover([*decisions, *newest], 0.0, OURS)
    return StoreKeeper(store, ledger, keep)


async def settled(store: Store, versions: list[int]) -> None:
    async with asyncio.timeout(5):
        while list(store.list()) != versions:
            await asyncio.sleep(0.01)


async def test_a_promised_version_outlives_the_newest_until_its_joiner_is_gone(
    fleet: Fleet, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    fleet.start("a")
    await fleet.admitted("a")
    fleet_id = (await fleet.controller.fleet()).fleet_id
    for version in range(1, 7):
        await publish(fleet)
        write(store, version, fleet_id)
        await fleet.controller.stored(version, str(store.path_of(version)))
        if version == 2:
            assert (await fleet.controller.join("b", "b-1")).version == 2
    await settled(store, [2, 4, 5, 6])
    fleet.dead.add("b")
    await fleet.elapse(3.0)
    await settled(store, [4, 5, 6])


async def test_a_version_that_is_being_read_goes_later(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for version in (1, 2):
        write(store, version)
    removing = keeper(store, stored=2).removal
    with store.reading(1):
        removing.start()
        await removing.aclose()
        assert list(store.list()) == [1, 2]
    removing.start()
    await removing.aclose()
    assert list(store.list()) == [2]


async def test_versions_of_another_fleet_are_not_counted_and_not_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for version in (10, 11, 12):
        write(store, version, "another")
    for version in (1, 2, 3):
        write(store, version)
    removing = keeper(store, keep=2, stored=3).removal
    removing.start()
    await removing.aclose()
    assert list(store.list()) == [2, 3, 10, 11, 12]


async def test_a_disk_that_fails_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "store")
    for version in (1, 2):
        write(store, version)
    (store.directory / ".v00000001.partial").write_text("in the way")
    removing = keeper(store, stored=2).removal
    for _ in range(3):
        removing.start()
        await removing.aclose()
    assert len([each for each in caplog.records if "old versions stay" in each.message]) == 1


async def test_another_fleet_is_never_rolled_back_to(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    write(store, 1)
    write(store, 10, "another")
    assert keeper(store).source(1) == str(store.path_of(1))
    with pytest.raises(InvalidRequest, match=r"in the store \[1\], got 10; \[10\] are another fleet's"):
        keeper(store).source(10)


@pytest.mark.parametrize("spoilt", ["{}", "", '{"version": 3, "tensors": {}}', None])
async def test_a_version_whose_manifest_cannot_be_read_is_never_rolled_back_to(
    tmp_path: Path, spoilt: str | None
) -> None:
    """Whose it is and what was written are not known."""
    store = Store(tmp_path / "store")
    for version in (1, 2):
        write(store, version)
    known = keeper(store)
    assert known.source(2) == str(store.path_of(2))
    manifest = store.path_of(2) / MANIFEST
    manifest.unlink()
    if spoilt is not None:
        manifest.write_text(spoilt)
    for each in (known, keeper(store)):  # one that has read it before, and one that has not
        with pytest.raises(
            InvalidRequest, match=r"version 2 cannot be rolled back to: .*; roll back to another one"
        ):
            each.source(2)
        assert each.source(1) == str(store.path_of(1))


async def test_a_controller_with_a_new_journal_refuses_an_old_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for version in (10, 11):
        write(store, version, "another")
    write(store, 12, None)
    for _ in range(2):
        with pytest.raises(
            JournalError,
            match=r"has versions \[10, 11, 12\] of a fleet without an id and fleet another, and the journal "
            r"in .*state is of fleet .*To start anew, move them away or set 'store.path'",
        ):
            Fleet(tmp_path)


async def test_a_controller_that_restarts_knows_its_store(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet_id = (await fleet.controller.fleet()).fleet_id
    write(Store(tmp_path / "store"), 1, fleet_id)
    await fleet.aclose()
    fleet = Fleet(tmp_path)
    assert (await fleet.controller.fleet()).fleet_id == fleet_id
    await fleet.aclose()
