import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.controller.store_keeper import StoreKeeper
from deployments.ledger.ledger import Ledger
from deployments.protocol.adapters import LoadRequest
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.weights.store.adapter_store import CONFIG, TENSORS
from deployments.weights.store.versions import Store
from tests.deployments.controller.fleet import Fleet
from tests.tiny_adapters import save_tiny_adapter


@pytest.fixture
async def adapters(fleet: Fleet, tmp_path: Path) -> Fleet:
    await fleet.serve("a", "b")
    for number in (1, 2):
        save_tiny_adapter(tmp_path / f"adapter-{number}", number)
    return fleet


async def load(fleet: Fleet, tmp_path: Path, number: int = 1, **options: Any) -> str:
    path = str(tmp_path / f"adapter-{number}")
    return (await fleet.controller.load_adapter(LoadRequest(name="math", path=path, **options))).full_name


async def test_a_load_returns_once_the_adapter_is_live_on_all_replicas(
    adapters: Fleet, tmp_path: Path
) -> None:
    assert await load(adapters, tmp_path) == "math@1"
    for replica in adapters.replicas.values():
        [live] = replica.adapters.live.values()
        assert live.full_name == "math@1" and Path(live.path).is_dir()
        assert Path(live.path).parent == tmp_path / "store" / "adapters"
    [status] = await adapters.controller.adapters()
    assert (status.state, status.replicas) == ("live", ("a", "b"))


async def test_the_files_of_an_unloaded_adapter_go(adapters: Fleet, tmp_path: Path) -> None:
    await load(adapters, tmp_path)
    await load(adapters, tmp_path, 2, in_place=True)
    await adapters.controller.unload_adapter("math")
    await adapters.until(lambda: not list((tmp_path / "store" / "adapters").iterdir()))
    assert await adapters.controller.adapters() == []


async def test_a_second_load_of_a_name_is_refused_while_its_files_are_waited_for(
    adapters: Fleet, tmp_path: Path
) -> None:
    first = asyncio.create_task(load(adapters, tmp_path, 3))
    await asyncio.sleep(0.05)
    with pytest.raises(Conflict, match="is being loaded"):
        await load(adapters, tmp_path)
    save_tiny_adapter(tmp_path / "adapter-3", 3)
    assert await first == "math@1"


async def test_a_caller_that_leaves_frees_the_name(adapters: Fleet, tmp_path: Path) -> None:
    first = asyncio.create_task(load(adapters, tmp_path, 3))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await load(adapters, tmp_path) == "math@2"


LOAD = "1" * 32


class Disk:
    """The disk of the fleet's copies: it stands still, and may be full then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes, self.full = threading.Event(), False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith((CONFIG, TENSORS)):
            assert self.goes.wait(20)
            if self.full:
                raise OSError(errno.ENOSPC, "no space")
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def holding(fleet: Fleet) -> list[bool]:
    return [bool(each.adapters.held) for each in fleet.replicas.values()]


async def test_an_adapter_is_loaded_while_its_copy_is_synced_and_live_after_it(
    adapters: Fleet, tmp_path: Path, disk: Disk
) -> None:
    loading = asyncio.create_task(load(adapters, tmp_path, load_id=LOAD))
    await adapters.until(lambda: all(holding(adapters)))
    await adapters.polled("a", "b")
    [status] = await adapters.controller.adapters()
    assert status.state == "loading" and not any(each.adapters.live for each in adapters.replicas.values())
    disk.goes.set()
    assert await loading == "math@1" and Path(status.path).is_dir()


async def test_an_adapter_is_dropped_if_it_cannot_be_stored(
    adapters: Fleet, tmp_path: Path, disk: Disk
) -> None:
    disk.full = True
    loading = asyncio.create_task(load(adapters, tmp_path, load_id=LOAD))
    await adapters.until(lambda: all(holding(adapters)))
    disk.goes.set()
    with pytest.raises(FleetUnavailable, match="cannot copy an adapter"):
        await loading
    assert not any(holding(adapters)) and await adapters.controller.adapters() == []
    disk.full = False
    assert await load(adapters, tmp_path) == "math@2"


async def test_a_cancelled_load_leaves_no_adapter(adapters: Fleet, tmp_path: Path, disk: Disk) -> None:
    loading = asyncio.create_task(load(adapters, tmp_path, load_id=LOAD))
    await adapters.until(lambda: all(holding(adapters)))
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    disk.goes.set()
    await adapters.until(lambda: not any(holding(adapters)))
    await adapters.polled("a", "b")
    assert await load(adapters, tmp_path) == "math@2"


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_a_process_that_is_lost_during_a_call_is_ended(operation: str, tmp_path: Path) -> None:
    save_tiny_adapter(tmp_path / "adapter-1", 1)
    fleet = Fleet(tmp_path, tick_s=2.0)  # the call is quicker
    await fleet.serve("a", "b")
    if operation == "unload":
        await load(fleet, tmp_path)
    fleet.hang("b")
    await fleet.elapse(4.5)
    await fleet.polled("a")
    await fleet.elapse(1.0)
    calling = load(fleet, tmp_path) if operation == "load" else fleet.controller.unload_adapter("math")
    try:
        await asyncio.gather(calling, fleet.until(lambda: fleet.killed == ["b"]))
        assert [each.replica_id for each in (await fleet.controller.fleet()).members] == ["a"]
    finally:
        await fleet.aclose()


# -- the files --------------------------------------------------------------------------------------


def keeper_in(tmp_path: Path, **options: Any) -> StoreKeeper:
    ledger = Ledger()
    ledger.recover((), 0.0)
    options["adapter_roots"] = [tmp_path]
    keeper = StoreKeeper(Store(tmp_path / "store"), ledger, tmp_path, 1, lambda _: None, **options)
    keeper.claim()
    return keeper


async def test_files_that_do_not_come_are_an_error_of_the_caller(tmp_path: Path) -> None:
    keeper = keeper_in(tmp_path, lag_s=0.1)
    with pytest.raises(NotFound, match="does not exist"):
        await keeper.copy_adapter(str(tmp_path / "a"), 1)
    (save_tiny_adapter(tmp_path / "a", 1) / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(InvalidRequest, match="no safetensors header") as raised:
        await keeper.copy_adapter(str(tmp_path / "a"), 1)
    assert not isinstance(raised.value, NotFound)


@pytest.mark.parametrize("path", ["", "a", "a\0b", "../a"])
async def test_a_path_is_absolute(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match="absolute"):
        await keeper_in(tmp_path).copy_adapter(path, 1)


async def test_a_store_that_cannot_be_written_is_not_the_callers_fault(tmp_path: Path) -> None:
    save_tiny_adapter(tmp_path / "a", 1)
    keeper = keeper_in(tmp_path)
    (tmp_path / "store" / "adapters").write_text("no directory")
    with pytest.raises(FleetUnavailable, match="cannot copy an adapter"):
        await keeper.copy_adapter(str(tmp_path / "a"), 1)


async def test_a_copy_that_cannot_be_made_durable_is_not_the_callers_fault(tmp_path: Path) -> None:
    keeper = keeper_in(tmp_path)
    with pytest.raises(FleetUnavailable, match="cannot copy an adapter"):
        await keeper.complete_adapter(1)


@pytest.mark.slow
async def test_a_disk_that_does_not_answer_is_given_up_and_keeps_none_of_the_loops_threads(
    tmp_path: Path,
) -> None:
    """Opening a pipe that nobody writes to waits, as a file of a server that is gone."""
    pipe = save_tiny_adapter(tmp_path / "hangs", 1) / "adapter_config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    keeper = keeper_in(tmp_path, disk_s=0.05)
    try:
        for adapter_id in range(40):
            with pytest.raises(Conflict, match=r"the disk has not answered within 0\.05 s"):
                await keeper.copy_adapter(str(pipe.parent), adapter_id)
        assert await asyncio.to_thread(lambda: True)
    finally:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # all of them come back
    save_tiny_adapter(tmp_path / "a", 1)
    keeper = keeper_in(tmp_path)
    assert (await keeper.copy_adapter(str(tmp_path / "a"), 41)).size_bytes > 0
