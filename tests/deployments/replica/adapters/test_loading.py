"""Where an adapter is read from, on one replica, and what is left of one that cannot be loaded."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deployments.host.shared_memory import disown
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapters.engine_adapters import EngineAdapters
from tests.deployments.replica.adapters.fake_llm import FIRST, FakeLlm, adapter, changed
from tests.fake_hub import FakeHub
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors

LOAD = "1" * 32


async def test_load_waits_for_a_lagging_file_system(tmp_path: Path, llm: FakeLlm) -> None:
    adapters = EngineAdapters(llm, llm.workers)
    directory = save_tiny_adapter(tmp_path / "a", 1)
    expected = adapter(directory)
    directory.rename(tmp_path / "b")
    loading = asyncio.create_task(adapters.load(expected))
    await asyncio.sleep(0.2)
    assert not loading.done()
    (tmp_path / "b").rename(directory)
    await loading
    assert adapters.state.held == (1,)


async def test_missing_files_are_rejected(tmp_path: Path, adapters: EngineAdapters) -> None:
    expected = replace(adapter(save_tiny_adapter(tmp_path / "a", 1)), path=str(tmp_path / "b"))
    with pytest.raises(PayloadRejected, match="cannot be read"):
        await adapters.load(expected)


async def test_workers_read_again_once_the_files_are_complete(tmp_path: Path, model: str) -> None:
    expected = adapter(save_tiny_adapter(tmp_path / "a", 1))
    for wait_s in (0.15, 1.0, 5.0):  # on a busy host the first check may come after the right files
        llm = FakeLlm(model)
        adapters = EngineAdapters(llm, llm.workers, lag_s=60.0)
        save_tiny_adapter(tmp_path / "a", 2)  # a shared file system shows what was there before
        loading = asyncio.create_task(adapters.load(expected))
        await asyncio.sleep(wait_s)
        save_tiny_adapter(tmp_path / "a", 1)
        await loading
        assert adapters.state.held == (1,)
        if llm.reads == 2:
            break
    assert llm.reads == 2


@pytest.mark.parametrize("brought", [False, True])
async def test_adapter_is_compared_with_the_hub_model(
    tmp_path: Path, model: str, hub: FakeHub, brought: bool
) -> None:
    hub.repositories["org/tiny"] = Path(model)
    llm = FakeLlm("org/tiny")
    adapters = EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    other = save_tiny_adapter(tmp_path / "b", 1, tensors=tiny_adapter_tensors(1, width=256))
    wrong = replace(adapter(other, 2), load_id=LOAD)
    if brought:
        await arrived(adapters, other)
    with pytest.raises(PayloadRejected, match="another base model"):
        await adapters.load(wrong)
    assert adapters.state.held == (1,)
    assert [options["local_files_only"] for _, options in hub.asked] == [True], "it is read once"
    disown()


async def test_unreadable_base_model_is_read_again_for_the_next_adapter(tmp_path: Path, model: str) -> None:
    base = Path(shutil.copytree(model, tmp_path / "model"))
    file = base / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:5])
    llm = FakeLlm(str(base))
    adapters = EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    wanted = adapter(save_tiny_adapter(tmp_path / "a", 1))
    with pytest.raises(PayloadRejected, match=r"model\.safetensors"):
        await adapters.load(wanted)
    file.write_bytes(whole)
    await adapters.load(wanted)
    assert adapters.state.held == (1,)


# -- what a transport has brought ---------------------------------------------------------------


async def arrived(adapters: EngineAdapters, source: Path, load_id: str = LOAD) -> Path:
    directory = Path(shutil.copytree(source, await adapters.reader.place(load_id)))
    adapters.reader.arrived(load_id)
    return directory


async def test_received_adapter_is_loaded_under_the_path_of_the_fleets_copy(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    expected = replace(adapter(source := save_tiny_adapter(tmp_path / "a", 1)), load_id=LOAD)
    directory = await arrived(adapters, source)
    source.rename(tmp_path / "not there yet")
    await adapters.load(expected)
    assert llm.read_from == {LOAD: str(directory)} and llm.loaded == {1: str(source)}
    assert adapters.state.received == (1,) and not directory.exists(), "host memory is free again"
    await adapters.drop(1)
    assert adapters.state.received == ()


async def test_received_adapter_is_read_before_its_load_instruction(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    await arrived(adapters, save_tiny_adapter(tmp_path / "a", 1))
    while not llm.reads:  # the test's own deadline ends it
        await asyncio.sleep(0.01)
    assert LOAD in llm.reading and llm.loaded == {}


@pytest.mark.parametrize("fault", ["damaged", "nan", "another", "unreadable", "gone"])
async def test_incomplete_received_adapter_is_loaded_from_the_store(
    tmp_path: Path,
    adapters: EngineAdapters,
    llm: FakeLlm,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = replace(adapter(source := save_tiny_adapter(tmp_path / "a", 1)), load_id=LOAD)
    came = source
    if fault == "damaged":
        came = save_tiny_adapter(tmp_path / "b", 2)
    elif fault == "nan":
        nan = torch.full((128, 4), torch.nan)
        came = save_tiny_adapter(tmp_path / "b", 1, tensors=changed(**{f"{FIRST}.lora_B.weight": nan}))
    directory = await adapters.reader.place("2" * 32 if fault == "another" else LOAD)
    if fault != "gone":
        shutil.copytree(came, directory)
    llm.unreadable = str(directory) if fault == "unreadable" else ""  # to a worker on another host
    adapters.reader.arrived("2" * 32 if fault == "another" else LOAD)
    with caplog.at_level("WARNING", "ray.serve"):
        await adapters.load(expected)
    assert llm.read_from["math@1"] == str(source) and adapters.state.received == ()
    assert ["loading math@1 from the store" in each.message for each in caplog.records] == [True] * (
        fault != "another"
    )
    assert LOAD not in llm.reading


async def test_only_the_last_received_adapter_is_kept(
    adapters: EngineAdapters, llm: FakeLlm, tmp_path: Path
) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    first = await arrived(adapters, source, "3" * 32)
    second = await arrived(adapters, source, "4" * 32)
    assert not first.exists() and second.exists() and "3" * 32 not in llm.reading
    disown()  # as at the end of the process
    assert not second.exists()


# -- what cannot be loaded ----------------------------------------------------------------------


async def test_failed_add_lora_leaves_no_adapter(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    llm.fails = True
    with pytest.raises(PayloadRejected, match="size mismatch"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    assert llm.loaded == {} and adapters.state.held == ()


async def test_failed_read_leaves_no_adapter(tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm) -> None:
    llm.torn = True
    with pytest.raises(PayloadRejected, match="unexpected module"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    assert llm.loaded == {} and llm.reading == {}


async def test_engine_without_lora_rejects_adapters(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    llm.vllm_config.lora_config = None
    with pytest.raises(PayloadRejected, match="enable_lora"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))


async def test_repeated_load_changes_nothing(tmp_path: Path, adapters: EngineAdapters) -> None:
    one = adapter(save_tiny_adapter(tmp_path / "a", 1))
    await adapters.load(one)
    await adapters.load(one)
    assert adapters.state.held == (1,)
