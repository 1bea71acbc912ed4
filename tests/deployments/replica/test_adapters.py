"""Adapters on one replica: what is refused, what requests find, and when one is unloaded."""

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
from vllm.config.lora import LoRAConfig
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.resolver import LoRAResolverRegistry
from vllm.plugins.lora_resolvers.filesystem_resolver import register_filesystem_resolver

from deployments.errors import PayloadRejected
from deployments.protocol.adapters import Adapter
from deployments.replica.adapters.check import NotYet, check_adapter
from deployments.replica.adapters.engine_adapters import EngineAdapters
from deployments.replica.spans import RECORDER, SpanRecorder, annotate_json
from deployments.weights.store.adapter_store import adapter_digest
from deployments.weights.wire.ownership import disown
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors
from tests.tiny_models import save_tiny_llama

CONFIG = LoRAConfig(max_lora_rank=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), 1))


def adapter(directory: Path, number: int = 1, name: str = "math") -> Adapter:
    digest = adapter_digest(directory)
    return Adapter(
        name=name,
        version=number,
        adapter_id=number,
        path=str(directory),
        digest=digest,
        size_bytes=1,
    )


class FakeLlm:
    """As `AsyncLLM`: loads what is there, fails otherwise, and loads nothing twice under an id."""

    def __init__(self, model: str) -> None:
        self.vllm_config = SimpleNamespace(lora_config=CONFIG)
        self.model_config = SimpleNamespace(model=model, max_model_len=64)
        self.renderer = self.input_processor = None  # of no matter to adapters
        self.loaded: dict[int, str] = {}
        self.fails = False
        self.logger_manager: Any = None
        self.reading: dict[str, int] = {}  # key -> how often it was asked for
        self.read: set[int] = set()  # ids that `add_lora` finds read
        self.torn = False
        self.read_from: dict[str, str] = {}
        self.unreadable = ""
        self.reads = 0

    async def workers(self, method: str, key: str, **arguments: Any) -> list[Any]:
        match method:
            case "adapter_read":
                self.reading[key] = 0
                self.reads += 1
                self.read_from[key] = arguments["path"]
            case "adapter_is_read":
                self.reading[key] += 1
                if self.torn or self.read_from[key] == self.unreadable:
                    raise Exception("Call to collective_rpc method failed:\nunexpected module")
                if self.reading[key] > 2:
                    self.read.add(arguments["adapter_id"])
                return [True, self.reading[key] > 2]  # one of two workers takes longer
            case "adapter_forget":
                self.reading.pop(key, None)
                self.read.discard(arguments["adapter_id"])
        return [None, None]

    async def add_lora(self, request: Any) -> bool:
        assert not request.load_inplace
        assert request.lora_int_id in self.read, "read by the engine, between two steps"
        self.read.remove(request.lora_int_id)
        assert request.lora_int_id not in self.loaded, "vLLM would keep the former one"
        self.loaded[request.lora_int_id] = request.lora_path
        if self.fails:  # in its activation: the files are in the engine's cache already
            raise Exception("Call to add_lora method failed:\nsize mismatch")
        return True

    async def remove_lora(self, adapter_id: int) -> bool:
        return self.loaded.pop(adapter_id, None) is not None


@pytest.fixture
def llm(model: str) -> FakeLlm:
    return FakeLlm(model)


@pytest.fixture
def adapters(llm: FakeLlm) -> Iterator[EngineAdapters]:
    yield EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)
    disown()  # what has arrived


# -- files -------------------------------------------------------------------------------------


def test_an_adapter_of_the_model_fits(tmp_path: Path, model: str) -> None:
    check_adapter(adapter(save_tiny_adapter(tmp_path / "a", 1)), model, CONFIG)


def changed(**tensors: Any) -> dict[str, torch.Tensor]:
    made = tiny_adapter_tensors(1)
    for name, tensor in tensors.items():
        if tensor is None:
            del made[name]
        else:
            made[name] = tensor
    return made


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


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
def test_what_does_not_fit_is_named(
    tmp_path: Path, model: str, tensors: dict[str, torch.Tensor], phrase: str
) -> None:
    directory = save_tiny_adapter(tmp_path / "a", 1, tensors=tensors)
    with pytest.raises(ValueError, match=phrase) as raised:
        check_adapter(adapter(directory), model, CONFIG)
    assert not isinstance(raised.value, NotYet)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [({"r": 16}, "max_lora_rank"), ({"use_dora": True}, "(?i)dora"), ({"bias": "all"}, "bias")],
)
def test_what_vllm_does_not_compute_is_refused(
    tmp_path: Path, model: str, config: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ValueError, match=phrase):
        check_adapter(adapter(save_tiny_adapter(tmp_path / "a", 1, **config)), model, CONFIG)


def test_other_bytes_than_the_fleet_copied_are_not_loaded(tmp_path: Path, model: str) -> None:
    expected = adapter(save_tiny_adapter(tmp_path / "a", 1))
    save_tiny_adapter(tmp_path / "a", 2)
    with pytest.raises(NotYet, match="digest"):
        check_adapter(expected, model, CONFIG)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("length", [0, 5, 20, -10])
def test_half_a_file_is_not_there_yet_whatever_else_is_wrong_with_it(
    tmp_path: Path, model: str, name: str, length: int
) -> None:
    expected = adapter(directory := save_tiny_adapter(tmp_path / "a", 1))
    (directory / name).write_bytes((directory / name).read_bytes()[:length])
    with pytest.raises(NotYet):
        check_adapter(expected, model, CONFIG)


async def test_a_shared_file_system_may_lag(tmp_path: Path, llm: FakeLlm) -> None:
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


async def test_files_that_do_not_come_are_rejected(tmp_path: Path, adapters: EngineAdapters) -> None:
    expected = replace(adapter(save_tiny_adapter(tmp_path / "a", 1)), path=str(tmp_path / "b"))
    with pytest.raises(PayloadRejected, match="cannot be read"):
        await adapters.load(expected)


async def test_what_was_read_before_the_files_were_right_is_read_again(tmp_path: Path, llm: FakeLlm) -> None:
    adapters = EngineAdapters(llm, llm.workers, lag_s=5.0)
    expected = adapter(save_tiny_adapter(tmp_path / "a", 1))
    save_tiny_adapter(tmp_path / "a", 2)  # a shared file system shows what was there before
    loading = asyncio.create_task(adapters.load(expected))
    await asyncio.sleep(0.15)
    save_tiny_adapter(tmp_path / "a", 1)
    await loading
    assert llm.reads == 2 and adapters.state.held == (1,)


# -- what a transport has brought ---------------------------------------------------------------


LOAD = "1" * 32


async def arrived(adapters: EngineAdapters, source: Path, load_id: str = LOAD) -> Path:
    directory = Path(shutil.copytree(source, await adapters.reader.place(load_id)))
    adapters.reader.arrived(load_id)
    return directory


async def test_what_has_arrived_is_loaded_and_what_vllm_reads_again_is_the_fleets_copy(
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


async def test_what_has_arrived_is_read_before_its_load_comes(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    await arrived(adapters, save_tiny_adapter(tmp_path / "a", 1))
    while not llm.reads:  # the test's own deadline ends it
        await asyncio.sleep(0.01)
    assert LOAD in llm.reading and llm.loaded == {}


@pytest.mark.parametrize("fault", ["damaged", "nan", "another", "unreadable", "gone"])
async def test_what_has_not_arrived_whole_is_read_from_the_fleets_copy(
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
    assert ["math@1 is loaded from the store" in each.message for each in caplog.records] == [True] * (
        fault != "another"
    )
    assert LOAD not in llm.reading


async def test_one_adapter_is_kept_at_most(adapters: EngineAdapters, llm: FakeLlm, tmp_path: Path) -> None:
    source = save_tiny_adapter(tmp_path / "a", 1)
    first = await arrived(adapters, source, "3" * 32)
    second = await arrived(adapters, source, "4" * 32)
    assert not first.exists() and second.exists() and "3" * 32 not in llm.reading
    disown()  # as at the end of the process
    assert not second.exists()


# -- the engine --------------------------------------------------------------------------------


async def test_what_vllm_cannot_load_stays_in_no_worker(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    llm.fails = True
    with pytest.raises(PayloadRejected, match="size mismatch"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    assert llm.loaded == {} and adapters.state.held == ()


async def test_what_a_worker_cannot_read_stays_in_no_worker(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    llm.torn = True
    with pytest.raises(PayloadRejected, match="unexpected module"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))
    assert llm.loaded == {} and llm.reading == {}


async def test_an_engine_without_lora_says_so(tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm) -> None:
    llm.vllm_config.lora_config = None
    with pytest.raises(PayloadRejected, match="enable_lora"):
        await adapters.load(adapter(save_tiny_adapter(tmp_path / "a", 1)))


async def test_a_load_that_comes_again_changes_nothing(tmp_path: Path, adapters: EngineAdapters) -> None:
    one = adapter(save_tiny_adapter(tmp_path / "a", 1))
    await adapters.load(one)
    await adapters.load(one)
    assert adapters.state.held == (1,)


async def test_only_what_is_loaded_can_be_live(tmp_path: Path, adapters: EngineAdapters) -> None:
    with pytest.raises(RuntimeError, match="not loaded"):
        await adapters.make_live([adapter(save_tiny_adapter(tmp_path / "a", 1))])


async def loaded(adapters: EngineAdapters, tmp_path: Path, count: int) -> list[Adapter]:
    made = [
        adapter(save_tiny_adapter(tmp_path / f"a{number}", number), number) for number in range(1, count + 1)
    ]
    for each in made:
        await adapters.load(each)
    return made


async def test_a_name_finds_its_newest_version_and_the_engine_hears_the_full_name(
    tmp_path: Path, adapters: EngineAdapters
) -> None:
    one, two = await loaded(adapters, tmp_path, 2)
    assert "math" not in adapters.named and "math@1" not in adapters.named
    await adapters.make_live([one])
    assert adapters.named["math"].lora_name == "math@1"
    await adapters.make_live([one, two])
    assert adapters.named["math"].lora_name == "math@2"
    assert adapters.named["math@1"].lora_name == "math@1"
    # What /v1/models lists:
    assert [each.lora_name for each in adapters.named.values()] == ["math@1", "math@2", "math"]


async def test_a_version_is_unloaded_after_its_last_request(
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


async def test_one_that_never_became_live_is_dropped_at_once(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    one, _ = await loaded(adapters, tmp_path, 2)
    await adapters.make_live([one])
    await adapters.drop(2)
    await adapters.drop(3)  # of an earlier life
    assert set(llm.loaded) == {1} and adapters.state.held == (1,)
    with pytest.raises(RuntimeError, match="live"):
        await adapters.drop(1)


async def test_the_figures_of_an_unloaded_adapter_go(
    tmp_path: Path, adapters: EngineAdapters, llm: FakeLlm
) -> None:
    gauge = Gauge("lora_requests_info", "", ["running"], registry=None)
    llm.logger_manager = SimpleNamespace(stat_loggers=[SimpleNamespace(gauge_lora_info=gauge), object()])
    [one] = await loaded(adapters, tmp_path, 1)
    await adapters.make_live([one])
    gauge.labels("math@1").set(1)
    await adapters.make_live([])
    assert next(iter(gauge.collect())).samples == []


async def test_no_engine_finds_adapters_by_itself(
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


def test_an_answer_names_its_adapter() -> None:
    recorder = SpanRecorder(3)
    recorder.adapter = "math@2"
    answer = json.loads(annotate_json(b'{"choices":[{"index":0}]}', recorder, 200))
    assert answer["adapter"] == answer["choices"][0]["adapter"] == "math@2"
    assert b"adapter" not in annotate_json(b'{"choices":[]}', SpanRecorder(3), 200)
