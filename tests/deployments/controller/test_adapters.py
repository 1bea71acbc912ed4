"""Adapters through the controller's shell: files, the ledger, the disk and callers that wait."""

import asyncio
from pathlib import Path

import pytest

from deployments.errors import Conflict, InvalidRequest
from deployments.protocol.adapters import LoadAdapter
from deployments.protocol.reports import Outcome
from tests.deployments.controller.fleet import Fleet
from tests.tiny_adapters import save_tiny_adapter


@pytest.fixture
async def adapters(fleet: Fleet, tmp_path: Path) -> Fleet:
    fleet.start("a", "b")
    await fleet.admitted("a", "b")
    for number in (1, 2):
        save_tiny_adapter(tmp_path / f"adapter-{number}", number)
    return fleet


async def load(fleet: Fleet, tmp_path: Path, number: int = 1, **options: bool) -> str:
    path = str(tmp_path / f"adapter-{number}")
    return (await fleet.controller.load_adapter("math", path, **options)).full_name


async def test_a_load_ends_when_all_replicas_answer_with_it(adapters: Fleet, tmp_path: Path) -> None:
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


async def test_what_replicas_reject_leaves_nothing_behind(adapters: Fleet, tmp_path: Path) -> None:
    for replica in adapters.replicas.values():
        replica.outcomes[LoadAdapter] = Outcome.REJECTED
    with pytest.raises(InvalidRequest, match="rejected here"):
        await load(adapters, tmp_path)
    await adapters.until(lambda: not list((tmp_path / "store" / "adapters").iterdir()))


async def test_a_caller_that_leaves_frees_the_name(adapters: Fleet, tmp_path: Path) -> None:
    first = asyncio.create_task(load(adapters, tmp_path, 3))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await load(adapters, tmp_path) == "math@2"


async def test_a_successor_knows_what_is_live(tmp_path: Path) -> None:
    save_tiny_adapter(tmp_path / "adapter-1", 1)
    first = Fleet(tmp_path)
    first.start("a")
    await first.admitted("a")
    await load(first, tmp_path)
    await first.aclose()
    successor = Fleet(tmp_path)
    [status] = await successor.controller.adapters()
    await successor.aclose()
    assert (status.name, status.version, status.state) == ("math", 1, "live")
