"""What requests find on one replica, and when an adapter is unloaded."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Gauge
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.plugins.lora_resolvers.filesystem_resolver import register_filesystem_resolver

from deployments.protocol.adapters import Adapter
from deployments.replica.adapters.engine_adapters import EngineAdapters
from deployments.replica.spans import RECORDER, SpanRecorder, annotate_json
from tests.deployments.replica.adapters.fake_llm import FakeLlm, adapter
from tests.tiny_adapters import save_tiny_adapter


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
    await adapters.make_live([one])
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
    await adapters.make_live([one])
    recorder = SpanRecorder(1)
    RECORDER.set(recorder)
    assert adapters.named["math"].lora_int_id == 1
    assert adapters.named["math"].lora_int_id == 1  # it is looked up twice, and is one use
    with adapters.uses.using(1):  # the engine's own
        await adapters.make_live([two])
        assert adapters.named["math"].lora_int_id == 1  # all parts of a request have the same version
        recorder.end()
        await asyncio.sleep(0)
        assert adapters.state.held == (1, 2) and adapters.state.live == (2,)
    await asyncio.sleep(0.01)
    assert adapters.state.held == (2,) and set(llm.loaded) == {2}
    RECORDER.set(None)


async def test_adapter_that_never_became_live_is_dropped_at_once(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    one, _ = await loaded(adapters, tmp_path, 2)
    await adapters.make_live([one])
    await adapters.drop(2)
    await adapters.drop(3)  # of an earlier life
    assert set(llm.loaded) == {1} and adapters.state.held == (1,)
    with pytest.raises(RuntimeError, match="live"):
        await adapters.drop(1)


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
