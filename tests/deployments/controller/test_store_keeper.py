"""The controller removes the versions that nobody needs, and no others; and it keeps out another fleet's."""

import asyncio
import shutil
from pathlib import Path

import pytest

from deployments.controller.store_keeper import StoreKeeper
from deployments.ledger.decisions import Cataloged, Decision, Stored
from deployments.ledger.ledger import Ledger
from deployments.protocol.adapters import Adapter, AdapterCatalog, LoadRequest
from deployments.protocol.errors import Conflict, InvalidRequest, JournalError
from deployments.protocol.ledger_config import AdapterLimits
from deployments.weights.store.owner import OWNER, claim
from deployments.weights.store.versions import MANIFEST, DirectoryLock, Store, VersionManifest
from tests.deployments.controller.fleet import Fleet, publish
from tests.tiny_adapters import save_tiny_adapter
from tests.waiting import reached

OURS = "fleet"


def write(store: Store, version: int, fleet_id: str | None = OURS, digest: str | None = None) -> None:
    """It is there, whoever's the store is."""
    directory = store.directory / f"v{version:08d}"
    directory.mkdir(parents=True)
    manifest = VersionManifest(version=version, fleet_id=fleet_id, digest=digest, tensors={})
    (directory / MANIFEST).write_text(manifest.encode())


def keeper(store: Store, *decisions: Decision, keep: int = 1, stored: int = 0) -> StoreKeeper:
    """Of a fleet whose journal has these decisions."""
    ledger = Ledger()
    newest = [Stored(version=stored, path="", label=None)] if stored else []
    ledger.recover([*decisions, *newest], 0.0, OURS)
    claim(store.directory, OURS, Path("/state"))
    return StoreKeeper(store, ledger, Path("/state"), keep)


async def settled(store: Store, versions: list[int]) -> None:
    await reached(lambda: list(store.list()) == versions)


async def test_a_version_that_is_being_read_outlives_the_newest(fleet: Fleet, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    await fleet.serve("a")
    fleet_id = (await fleet.controller.fleet()).fleet_id
    for version in range(1, 7):
        await publish(fleet)
        write(store, version, fleet_id)
        await fleet.controller.stored(version, str(store.path_of(version)))
        if version == 2:
            reading = DirectoryLock(store.path_of(2))
    await settled(store, [2, 4, 5, 6])
    reading.close()
    await settled(store, [4, 5, 6])


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_version_whose_writer_could_not_report_it_is_found(
    fleet: Fleet, tmp_path: Path, restarts: bool
) -> None:
    """A fleet was stopped while it was written, or the writer was killed just after."""
    store = Store(tmp_path / "store")
    await fleet.serve("a")
    fleet_id = (await fleet.controller.fleet()).fleet_id
    for _ in range(2):
        await publish(fleet)
    write(store, 2, fleet_id, (await fleet.controller.rounds())[-1].digest)
    write(store, 3, "another")
    if restarts:
        await fleet.restart()
        assert (await fleet.controller.join("b", "b-1")).version == 2
    async with asyncio.timeout(5):
        while (await fleet.controller.fleet()).stored_version != 2:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("ours", "theirs", "keep", "left"),
    [([1, 2, 4, 5], 3, 1, [3, 4, 5]), ([1, 2, 3, 4, 7], 9, 2, [3, 4, 7, 9])],
)
async def test_versions_of_others_or_newer_than_the_newest_known_are_neither_removed_nor_counted(
    tmp_path: Path, ours: list[int], theirs: int, keep: int, left: list[int]
) -> None:
    """Those of another run that were copied there, or those that a journal from before does not know."""
    store = Store(tmp_path / "store")
    for version in ours:
        write(store, version)
    write(store, theirs, "another")
    removing = keeper(store, keep=keep, stored=4)
    removing.remove_old()
    await removing.aclose()
    assert list(store.list()) == left


async def test_copies_of_adapters_that_nothing_needs_are_removed(tmp_path: Path) -> None:
    """Also what a dead process did not complete."""
    store = Store(tmp_path / "store")
    live = Adapter(name="a", version=2, adapter_id=2, path="", digest="", size_bytes=0)
    removing = keeper(store, Cataloged(catalog=AdapterCatalog(live=(live,))))
    for name in ("a00000001", "a00000002", ".a00000007.partial"):
        (store.directory / "adapters" / name).mkdir(parents=True)
    removing.remove_old()
    await removing.aclose()
    assert [each.name for each in (store.directory / "adapters").iterdir()] == ["a00000002"]


async def test_a_disk_that_fails_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "store")
    for version in (1, 2):
        write(store, version)
    (store.directory / ".v00000001.partial").write_text("in the way")
    removing = keeper(store, stored=2)
    for _ in range(3):
        removing.remove_old()
        await removing.aclose()
    assert len([each for each in caplog.records if "stay in the store" in each.message]) == 1


async def test_another_fleet_is_never_rolled_back_to(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    write(store, 1)
    write(store, 10, "another")
    assert keeper(store).source(1) == str(store.path_of(1))
    with pytest.raises(InvalidRequest, match="version 10 cannot be rolled back to: its manifest is of fleet"):
        keeper(store).source(10)
    with pytest.raises(InvalidRequest, match=r"expected one in the store \[1, 10\], got 2"):
        keeper(store).source(2)


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
    for _ in range(2):
        with pytest.raises(
            JournalError,
            match=r"has versions \[10, 11\] and no fleet.json, which names their fleet; the journal in "
            r".*state is of fleet .*To start anew, move the store away or set 'store.path'",
        ):
            Fleet(tmp_path)
    assert not (store.directory / OWNER).exists()


async def load(fleet: Fleet, directory: Path) -> Path:
    request = LoadRequest(name="math", path=str(directory / "adapter"), in_place=True)
    return Path((await fleet.controller.load_adapter(request)).path)


async def with_adapter(fleet: Fleet, directory: Path) -> Path:
    """Where the fleet keeps an adapter that is live on it."""
    await fleet.serve("a")
    save_tiny_adapter(directory / "adapter", 1)
    return await load(fleet, directory)


def share(store: Path, directory: Path) -> None:
    """A fleet in this directory will use the store."""
    directory.mkdir()
    (directory / "store").symlink_to(store)


async def test_a_second_fleet_on_a_store_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = Fleet(tmp_path / "first")
    files = await with_adapter(first, tmp_path / "first")
    fleet_id = (await first.controller.fleet()).fleet_id
    share(tmp_path / "first" / "store", tmp_path / "second")
    before = sorted((tmp_path / "first" / "store").rglob("*"))
    with pytest.raises(
        JournalError, match=rf"belongs to fleet {fleet_id} .*first/state.*, and this is fleet"
    ):
        Fleet(tmp_path / "second")
    assert sorted((tmp_path / "first" / "store").rglob("*")) == before and files.is_dir()
    await first.aclose()


async def test_a_fleet_with_a_copied_journal_is_refused_by_the_store_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is the same."""
    monkeypatch.setattr("deployments.controller.store_keeper.PREDECESSOR_S", 0.1)
    first = Fleet(tmp_path / "first")
    await first.controller.fleet()
    share(tmp_path / "first" / "store", tmp_path / "second")
    shutil.copytree(tmp_path / "first" / "state", tmp_path / "second" / "state")
    with pytest.raises(JournalError, match="another controller of the same fleet: was 'state_dir' copied"):
        Fleet(tmp_path / "second")
    await first.aclose()
    await Fleet(tmp_path / "second").aclose()


async def test_a_fleet_whose_store_was_given_to_another_leaves_it_alone(tmp_path: Path) -> None:
    """An operator moves the store away, to make place for another fleet, while the first one still runs."""
    first = Fleet(tmp_path / "first", tick_s=1000.0)
    await with_adapter(first, tmp_path / "first")
    store = tmp_path / "first" / "store"
    store.rename(tmp_path / "away")
    claim(store, "another", tmp_path)
    theirs = save_tiny_adapter(store / "adapters" / "a00000077", 1)
    write(Store(store), 1, "another")
    first.controller._keeper.remove_old()
    await first.controller._keeper.aclose()
    with pytest.raises(Conflict, match="belongs to fleet another"):
        await load(first, tmp_path / "first")
    assert theirs.is_dir() and Store(store).list() == [1]
    assert [each.name for each in (store / "adapters").iterdir()] == ["a00000077"]
    await first.aclose()


async def test_an_empty_directory_in_place_of_the_store_is_not_written_to(tmp_path: Path) -> None:
    """As when its disk is unmounted: the versions are elsewhere, and come back."""
    fleet = Fleet(tmp_path)
    await with_adapter(fleet, tmp_path)
    await publish(fleet)
    fleet_id = (await fleet.controller.fleet()).fleet_id
    store = Store(tmp_path / "store")
    write(store, 1, fleet_id)
    await fleet.controller.stored(1, str(store.path_of(1)))
    store.directory.rename(tmp_path / "away")
    store.directory.mkdir()
    fleet.controller._keeper.remove_old()
    await fleet.controller._keeper.aclose()
    gone = rf"fleet.json is not there, and this is fleet {fleet_id}'s store: is its disk mounted"
    with pytest.raises(Conflict, match=gone):
        await load(fleet, tmp_path)
    with pytest.raises(JournalError, match=gone), store.writing(2, fleet_id):
        pass
    assert not [*store.directory.iterdir()] and (await fleet.controller.fleet()).members[0].admitted
    await fleet.aclose()
    with pytest.raises(JournalError, match=gone):  # its successor
        Fleet(tmp_path)
    store.directory.rmdir()
    (tmp_path / "away").rename(store.directory)
    fleet = Fleet(tmp_path)
    with store.writing(2, fleet_id):
        pass
    await fleet.aclose()


async def test_a_store_that_no_version_was_written_to_may_be_removed(tmp_path: Path) -> None:
    for _ in range(2):
        await Fleet(tmp_path).aclose()
        (tmp_path / "store" / OWNER).unlink()
    await Fleet(tmp_path).aclose()
    assert (tmp_path / "store" / OWNER).exists()


# A state directory is of one model: engines would load the stored versions of another under its name.


REFUSED = r"state .*has versions of the model 'one', and 'model' is 'two'"


async def used(directory: Path, model: str | None) -> None:
    """A fleet runs, commits a version, and ends."""
    fleet = Fleet(directory, model=model)
    await fleet.serve("a")
    await publish(fleet)
    await fleet.aclose()


async def unused(directory: Path, model: str | None) -> None:
    """A fleet runs and ends."""
    fleet = Fleet(directory, model=model)
    await fleet.controller.fleet()
    await fleet.aclose()


async def test_the_versions_of_one_model_are_not_served_as_another(tmp_path: Path) -> None:
    await used(tmp_path, "one")
    for _ in range(2):
        with pytest.raises(JournalError, match=REFUSED):
            Fleet(tmp_path, model="two")
    await unused(tmp_path, "one")  # the state was not changed, nor is it locked


async def test_a_fleet_that_has_committed_nothing_may_serve_another_model(tmp_path: Path) -> None:
    await unused(tmp_path, "another")
    await used(tmp_path, "one")
    with pytest.raises(JournalError, match=REFUSED):
        Fleet(tmp_path, model="two")


async def test_an_adapter_is_of_a_model_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, model="one")
    await with_adapter(fleet, tmp_path)
    await fleet.aclose()
    with pytest.raises(JournalError, match=REFUSED):
        Fleet(tmp_path, model="two")


async def test_live_adapters_are_not_given_to_replicas_that_take_none(tmp_path: Path) -> None:
    none = AdapterLimits(refusal="set 'x' to true")
    refused = r"1 live adapters, among them 'math@1'.*set 'x' to true"
    fleet = Fleet(tmp_path)
    await with_adapter(fleet, tmp_path)
    await fleet.aclose()
    for _ in range(2):
        with pytest.raises(JournalError, match=refused):
            Fleet(tmp_path, adapters=none)
    fleet = Fleet(tmp_path)  # the state was not changed, nor is it locked
    await fleet.serve("a")
    await fleet.controller.unload_adapter("math")
    await fleet.aclose()
    await Fleet(tmp_path, adapters=none).aclose()
