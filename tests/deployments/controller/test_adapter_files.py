import asyncio
import os
from pathlib import Path

import pytest

from deployments.controller.store_keeper import AdapterKeeper
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from tests.tiny_adapters import save_tiny_adapter


def owned() -> None:
    """The store is this fleet's."""


async def test_files_that_do_not_come_are_an_error_of_the_caller(tmp_path: Path) -> None:
    keeper = AdapterKeeper(tmp_path / "store", [tmp_path], owned, lag_s=0.1)
    with pytest.raises(NotFound, match="does not exist"):
        await keeper.copy(str(tmp_path / "a"), 1)
    (save_tiny_adapter(tmp_path / "a", 1) / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(InvalidRequest, match="no safetensors header") as raised:
        await keeper.copy(str(tmp_path / "a"), 1)
    assert not isinstance(raised.value, NotFound)


@pytest.mark.parametrize("path", ["", "a", "a\0b", "../a"])
async def test_a_path_is_absolute(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match="absolute"):
        await AdapterKeeper(tmp_path / "store", [tmp_path], owned).copy(path, 1)


async def test_a_store_that_cannot_be_written_is_not_the_callers_fault(tmp_path: Path) -> None:
    save_tiny_adapter(tmp_path / "a", 1)
    (tmp_path / "store").write_text("no directory")
    keeper = AdapterKeeper(tmp_path / "store", [tmp_path], owned)
    with pytest.raises(FleetUnavailable, match="cannot copy an adapter"):
        await keeper.copy(str(tmp_path / "a"), 1)


async def test_a_copy_that_cannot_be_made_durable_is_not_the_callers_fault(tmp_path: Path) -> None:
    keeper = AdapterKeeper(tmp_path / "store", [tmp_path], owned)
    with pytest.raises(FleetUnavailable, match="cannot copy an adapter"):
        await keeper.complete(1)


@pytest.mark.slow
async def test_a_disk_that_does_not_answer_is_given_up_and_keeps_none_of_the_loops_threads(
    tmp_path: Path,
) -> None:
    """Opening a pipe that nobody writes to waits, as a file of a server that is gone."""
    pipe = save_tiny_adapter(tmp_path / "hangs", 1) / "adapter_config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    keeper = AdapterKeeper(tmp_path / "store", [tmp_path], owned, disk_s=0.05)
    try:
        for adapter_id in range(40):
            with pytest.raises(Conflict, match=r"the disk has not answered within 0\.05 s"):
                await keeper.copy(str(pipe.parent), adapter_id)
        assert await asyncio.to_thread(lambda: True)
    finally:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # all of them come back
    save_tiny_adapter(tmp_path / "a", 1)
    keeper = AdapterKeeper(tmp_path / "store", [tmp_path], owned)
    assert (await keeper.copy(str(tmp_path / "a"), 41)).size_bytes > 0
