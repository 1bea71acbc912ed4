"""A real engine in which faults are planted that no digest shows, and its scores of the proof with each."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm.lora.request import LoRARequest

from deployments.protocol.adapters import Adapter
from deployments.protocol.poll import Scores
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.replica.server_arguments import EngineSpec
from deployments.weights.store.adapter_store import adapter_digest
from tests.tiny_adapters import save_tiny_adapter
from tests.tiny_models import save_tiny_experts, save_tiny_family, save_tiny_llama, save_tokenizer

SEQUENCES = 4

# -- what runs in the engine core's process, which is the worker's too --------------------------------------


def scale_norm(worker: Any, factor: float) -> None:
    """A layer is not the one that was published: its keys and values, too."""
    worker.model_runner.model.model.layers[0].input_layernorm.weight.data.mul_(factor)


def scale_all(worker: Any, factor: float) -> None:
    """The scales of quantized weights, or those of attention."""
    modules = list(worker.model_runner.model.modules())
    if scales := [each.weight_scale for each in modules if "weight_scale" in each._parameters]:
        for scale in scales:
            scale.data.mul_(factor)
        return
    # Latent attention has one scale for prompts and one for decoding.
    found = [getattr(each, name, None) for each in modules for name in ("impl", "prefill_backend")]
    attending = [each for each in found if each is not None]
    assert attending and len(set(map(id, attending))) == len(attending)
    for each in attending:
        each.scale *= factor


def exchange_adapter(worker: Any, name: str, adapter_id: int, path: str) -> None:
    """Under this name and id are the weights of another version."""
    worker.remove_lora(adapter_id)
    worker.add_lora(LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=path))


def compiles_comparison(worker: Any) -> bool:
    """See `deployments.replica.cpu_sampling`."""
    from vllm.v1.sample import sampler

    return hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable")


def keep_caches(worker: Any) -> None:
    """A commit does not reset the prefix cache, and its blocks are found whatever the version is."""
    from vllm.v1.engine.core import EngineCoreProc

    from deployments.replica import engine_core

    engine_core._salt = lambda version, own: f"/{own}"
    setattr(EngineCoreProc, engine_core.RESET_CACHES, lambda core, recompute: None)


# -- the test's side ----------------------------------------------------------------------------------------


class FaultyEngine:
    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine

    async def plant(self, fault: Callable[..., Any], *args: Any) -> Any:
        return (await self._engine.llm.collective_rpc(fault, args=args))[0]

    async def scores(self) -> Scores:
        """With the next version, as after a commit."""
        engine = self._engine
        await engine.reset_caches(recompute=True)
        await engine.llm.engine_core.set_weight_version_async(str(engine.version + 1))
        engine.version += 1
        proof = Proof(engine, SEQUENCES)
        proof.begin_if_due()
        async with asyncio.timeout(60):
            while proof.report() is None:
                await asyncio.sleep(0.01)
        found = proof.scores
        assert isinstance(found, Scores) and found.version == engine.version
        return found


def counted() -> float:
    """Requests and tokens in vLLM's metrics."""
    names = ("vllm:request_success", "vllm:prompt_tokens", "vllm:generation_tokens")
    families = (each for each in REGISTRY.collect() if each.name in names)
    return sum(sample.value for each in families for sample in each.samples if sample.name.endswith("_total"))


def saved(directory: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """A model, and arguments of its engine."""
    if kind == "experts":
        return save_tiny_experts(directory, 1), {}
    if kind == "mla":
        save_tokenizer(save_tiny_family(directory, "deepseek_v3", 1))
        return directory, {}
    if kind == "fp8":
        return save_tiny_llama(directory, 1, width=256), {"quantization": "fp8"}
    return save_tiny_llama(directory, 1), {"enable_lora": True, "max_lora_rank": 8}


def scores_with_faults(directory: Path, kind: str, on_gpu: bool) -> dict[str, Any]:
    return asyncio.run(_scores_with_faults(directory, kind, on_gpu))


async def _scores_with_faults(directory: Path, kind: str, on_gpu: bool) -> dict[str, Any]:
    model, arguments = saved(directory / "model", kind)
    if on_gpu:
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 28}
    spec = EngineSpec(
        model=str(model),
        served_model_name="tiny",
        backend="slipstream_ipc" if on_gpu else "shm",
        staging="host",
        arguments={
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            **arguments,
        },
    )
    engine = await ReplicaEngine.start(spec, version=0)
    try:
        it, found = FaultyEngine(engine), {}
        found["first"] = await it.scores()
        found["again"] = await it.scores()
        await it.plant(scale_all, 1.1)
        found["wrong scale"] = await it.scores()
        await it.plant(scale_all, 1 / 1.1)
        await it.plant(scale_norm, 1.1)
        found["other layer"] = await it.scores()
        await it.plant(scale_norm, 1 / 1.1)
        found["mended"] = await it.scores()
        if "enable_lora" in arguments:
            await exchanged(engine, it, directory / "math", found)
        await it.plant(keep_caches)
        await it.scores()  # its blocks stay
        await it.plant(scale_norm, 1.1)
        found["stale cache"] = await it.scores()
        found["counted"] = counted()
        found["compiles"] = await it.plant(compiles_comparison)
        return found
    finally:
        await engine.stop()


async def exchanged(engine: ReplicaEngine, it: FaultyEngine, directory: Path, found: dict[str, Any]) -> None:
    """An adapter, and then another version under its name."""
    path, other = (save_tiny_adapter(directory / str(version), version) for version in (1, 2))
    digest = adapter_digest(path)
    math = Adapter(name="math", version=1, adapter_id=1, path=str(path), digest=digest, size_bytes=1)
    await engine.adapters.load(math)
    await engine.adapters.make_live([math])
    found["adapter"] = await it.scores()
    await it.plant(exchange_adapter, math.full_name, math.adapter_id, str(other))
    found["other adapter"] = await it.scores()
    await engine.adapters.make_live([])
