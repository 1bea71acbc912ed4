import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import Gauge
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.plugins.lora_resolvers.filesystem_resolver import register_filesystem_resolver

from deployments.host.shared_memory import disown
from deployments.protocol.adapters import Adapter
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapter_check import check_adapter
from deployments.replica.engine_adapters import EngineAdapters
from deployments.replica.spans import RECORDER, SpanRecorder, annotate_json
from deployments.weights.store.adapter_store import Incomplete
from deployments.weights.store.hub import read_schema
from tests.deployments.replica.adapter_llm import CONFIG, FIRST, FakeLlm, adapter, changed
from tests.fake_hub import FakeHub
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), 1))


@pytest.fixture
def llm(model: str) -> FakeLlm:
    return FakeLlm(model)


@pytest.fixture
def adapters(llm: FakeLlm) -> Iterator[EngineAdapters]:
    yield EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    disown()  # what has arrived


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
    assert adapters.held == (1,)


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
        assert adapters.held == (1,)
        if llm.reads == 2:
            break
    assert llm.reads == 2


async def test_adapter_is_compared_with_the_hub_model(tmp_path: Path, model: str, hub: FakeHub) -> None:
    hub.repositories["org/tiny"] = Path(model)
    llm = FakeLlm("org/tiny")
    adapters = EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    other = save_tiny_adapter(tmp_path / "b", 1, tensors=tiny_adapter_tensors(1, width=256))
    with pytest.raises(PayloadRejected, match="another base model"):
        await adapters.load(adapter(other, 2))
    assert adapters.held == (1,)
    assert [options["local_files_only"] for _, options in hub.asked] == [True], "it is read once"


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
    assert adapters.held == (1,)


# -- what cannot be loaded ----------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "said"), [("fails", "size mismatch"), ("torn", "unexpected module")])
async def test_failed_read_or_add_lora_leaves_no_adapter(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm, fault: str, said: str
) -> None:
    setattr(llm, fault, True)
    with pytest.raises(PayloadRejected, match=said):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    assert llm.loaded == llm.reading == {} and adapters.held == ()


async def test_repeated_load_changes_nothing(tmp_path: Path, adapters: EngineAdapters) -> None:
    one = adapter(save_tiny_adapter(tmp_path / "a", 1))
    await adapters.load(one)
    await adapters.load(one)
    assert adapters.held == (1,)


# -- which adapter files are refused, and which are not there yet ----------------------------------


@pytest.mark.parametrize(
    ("tensors", "phrase"),
    [
        (tiny_adapter_tensors(1, width=256), "another base model"),
        (tiny_adapter_tensors(1, layers=3), "layers.2.self_attn.q_proj' is no module of the base model"),
        (tiny_adapter_tensors(1, rank=16), "rank 16, expected at most max_lora_rank, 8"),
        (changed(**{f"{FIRST}.lora_B.weight": None}), "has lora_A alone"),
        (changed(**{f"{FIRST}.lora_B.weight": torch.zeros(128, 5)}), "have the shapes"),
        (changed(**{f"{FIRST}.lora_B.weight": torch.full((128, 4), torch.nan)}), "NaN or an infinity"),
    ],
)
def test_misfit_is_named(tmp_path: Path, model: str, tensors: dict[str, torch.Tensor], phrase: str) -> None:
    directory = save_tiny_adapter(tmp_path / "a", 1, tensors=tensors)
    with pytest.raises(ValueError, match=phrase) as raised:
        check_adapter(adapter(directory), read_schema(Path(model)), CONFIG)
    assert not isinstance(raised.value, Incomplete)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [({"r": 16}, "max_lora_rank"), ({"use_dora": True}, "(?i)dora"), ({"bias": "all"}, "bias")],
)
def test_unsupported_adapter_config_is_refused(
    tmp_path: Path, model: str, config: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ValueError, match=phrase):
        check_adapter(
            adapter(save_tiny_adapter(tmp_path / "a", 1, **config)), read_schema(Path(model)), CONFIG
        )


def test_adapter_with_another_digest_is_not_loaded(tmp_path: Path, model: str) -> None:
    expected = adapter(save_tiny_adapter(tmp_path / "a", 1))
    save_tiny_adapter(tmp_path / "a", 2)
    with pytest.raises(Incomplete, match="digest"):
        check_adapter(expected, read_schema(Path(model)), CONFIG)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("length", [0, 5, 20, -10])
def test_truncated_file_is_incomplete(tmp_path: Path, model: str, name: str, length: int) -> None:
    expected = adapter(directory := save_tiny_adapter(tmp_path / "a", 1))
    (directory / name).write_bytes((directory / name).read_bytes()[:length])
    with pytest.raises(Incomplete):
        check_adapter(expected, read_schema(Path(model)), CONFIG)


# -- what requests find on one replica, and when an adapter is unloaded ----------------------------


async def test_only_loaded_adapters_can_be_live(tmp_path: Path, adapters: EngineAdapters) -> None:
    with pytest.raises(RuntimeError, match="not loaded"):
        await adapters.make_live([adapter(save_tiny_adapter(tmp_path / "a", 1))])


async def loaded(adapters: EngineAdapters, tmp_path: Path, count: int) -> list[Adapter]:
    made = [
        adapter(save_tiny_adapter(tmp_path / f"a{number}", number), number) for number in range(1, count + 1)
    ]
    for each in made:
        await adapters.load(each)
    return made


async def test_name_maps_to_its_newest_version(tmp_path: Path, adapters: EngineAdapters) -> None:
    one, two = await loaded(adapters, tmp_path, 2)
    assert "math" not in adapters.named and "math@1" not in adapters.named
    await adapters.make_live([one], keep=[2])
    assert adapters.named["math"].lora_name == "math@1"
    await adapters.make_live([one, two])
    assert adapters.named["math"].lora_name == "math@2"
    assert adapters.named["math@1"].lora_name == "math@1"
    # What /v1/models lists:
    assert [each.lora_name for each in adapters.named.values()] == ["math@1", "math@2", "math"]


async def test_adapter_is_unloaded_after_its_last_request(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    one, two = await loaded(adapters, tmp_path, 2)
    await adapters.make_live([one], keep=[2])
    recorder = SpanRecorder(1)
    RECORDER.set(recorder)
    assert adapters.named["math"].lora_int_id == 1
    assert adapters.named["math"].lora_int_id == 1  # it is looked up twice, and is one use
    with adapters.uses.using(1):  # the engine's own
        await adapters.make_live([two])
        assert adapters.named["math"].lora_int_id == 1  # all parts of a request have the same version
        recorder.end()
        await asyncio.sleep(0)
        assert adapters.held == (1, 2) and adapters.live_ids == (2,)
    await asyncio.sleep(0.01)
    assert adapters.held == (2,) and set(llm.loaded) == {2}
    RECORDER.set(None)


async def test_adapter_that_never_became_live_goes_unless_it_is_kept(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    one, _ = await loaded(adapters, tmp_path, 2)
    await adapters.make_live([one], keep=[2])
    assert set(llm.loaded) == {1, 2}
    await adapters.make_live([one], keep=[3])  # still to be loaded
    assert set(llm.loaded) == {1} and adapters.held == (1,)


async def test_metrics_of_an_unloaded_adapter_are_cleared(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    gauge = Gauge("lora_requests_info", "", ["running"], registry=None)
    llm.logger_manager = SimpleNamespace(stat_loggers=[SimpleNamespace(gauge_lora_info=gauge), object()])
    [one] = await loaded(adapters, tmp_path, 1)
    await adapters.make_live([one])
    gauge.labels("math@1").set(1)
    await adapters.make_live([])
    assert next(iter(gauge.collect())).samples == []


async def test_lora_resolvers_are_disabled(
    tmp_path: Path, llm: FakeLlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's resolvers, which its users switch on by variables, load into the one engine that is asked."""
    base = {"base_model_name_or_path": llm.model_config.model}
    save_tiny_adapter(tmp_path / "stray", 1, **base)
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})
    register_filesystem_resolver()
    client: Any = llm
    models = OpenAIServingModels(client, [BaseModelPath(name="base", model_path="base")])
    adapters = EngineAdapters(llm, llm.workers, models)
    found = await models.resolve_lora("stray")
    assert isinstance(found, ErrorResponse) and found.error.code == 404
    assert llm.loaded == {} and "stray" not in adapters.named


def test_response_names_its_adapter() -> None:
    recorder = SpanRecorder(3)
    recorder.adapter = "math@2"
    answer = json.loads(annotate_json(b'{"choices":[{"index":0}]}', recorder, 200))
    assert answer["adapter"] == answer["choices"][0]["adapter"] == "math@2"
    assert b"adapter" not in annotate_json(b'{"choices":[]}', SpanRecorder(3), 200)
