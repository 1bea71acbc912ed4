import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from deployments.controller.store_keeper import StoreKeeper
from deployments.ledger.ledger import Ledger
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.weights.store.versions import Store
from tests.tiny_adapters import save_tiny_adapter


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
