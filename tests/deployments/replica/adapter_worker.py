"""A real vLLM model with LoRA on a CPU, and the worker's half of a load.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.model_loader import get_model

from deployments.protocol.adapters import Adapter
from deployments.replica.engine_adapters import EngineAdapters
from deployments.replica.worker_calls import WorkerCalls
from deployments.replica.worker_extension import WorkerExtension
from deployments.weights.store.adapter_store import adapter_digest
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors
from tests.tiny_models import save_tiny_llama


def worker(directory: Path) -> Any:
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU
    save_tiny_llama(directory / "model", 1)
    config = EngineArgs(
        model=str(directory / "model"),
        max_model_len=64,
        enforce_eager=True,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        manager.create_lora_manager(model, config)
    made: Any = WorkerExtension()
    made.model_runner = SimpleNamespace(lora_manager=manager)
    made.config = config
    return made


class Llm:
    """As `AsyncLLM`, with this one worker and no engine."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.vllm_config, self.model_config = made.config, made.config.model_config
        self.calls: list[str] = []

    async def workers(self, method: str, **arguments: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(self._made, method)(**arguments)]

    async def add_lora(self, request: LoRARequest) -> bool:
        return bool(self._made.model_runner.lora_manager.add_adapter(request))


async def load(made: Any, source: Path, adapter_id: int) -> None:
    llm = Llm(made)
    calls = WorkerCalls(llm.workers)
    await calls.connect()
    adapters = EngineAdapters(llm, calls, lag_s=0.0)
    llm.calls.clear()
    await adapters.load(
        Adapter(
            name="math",
            version=1,
            adapter_id=adapter_id,
            path=str(source),
            digest=adapter_digest(source),
            size_bytes=1,
        )
    )
    calls.close()
    assert llm.calls == [], "none waited for a decoding step"


def read(made: Any, directory: Path, adapter_id: int) -> None:
    made.adapter_read(adapter_id=adapter_id, path=str(directory), is_3d=False)
    deadline = time.monotonic() + 30
    while not made.adapter_is_read(adapter_id=adapter_id):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def add(made: Any, directory: Path, adapter_id: int) -> Any:
    """vLLM's own step; what the first layer's slot then has of lora_B."""
    made.model_runner.lora_manager.add_adapter(
        LoRARequest(lora_name=f"a@{adapter_id}", lora_int_id=adapter_id, lora_path=str(directory))
    )
    return in_slot(made, adapter_id)


def in_slot(made: Any, adapter_id: int) -> Any:
    manager = made.model_runner.lora_manager
    slot = manager._adapter_manager.lora_index_to_id.index(adapter_id)
    module = manager._adapter_manager.modules["model.layers.0.mlp.down_proj"]
    return module.lora_b_stacked[0][slot, 0, :, :4]


def load_adapters(directory: Path) -> dict[str, Any]:
    made = worker(directory)
    expected = tiny_adapter_tensors(1)["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    source = save_tiny_adapter(directory / "a", 1)
    found: dict[str, Any] = {}
    read(made, source, 5)
    file = source / "adapter_model.safetensors"
    file.rename(directory / "away")  # `add_lora` reads nothing any more
    found["added_from_what_was_read"] = torch.equal(add(made, source, 5), expected)
    (directory / "away").rename(file)
    made.model_runner.lora_manager.remove_all_adapters()  # as after a base round
    found["read_again_by_vllm"] = torch.equal(add(made, source, 1), expected)
    made.model_runner.lora_manager.remove_all_adapters()
    asyncio.run(load(made, source, 9))
    found["added_beside_the_engine"] = torch.equal(in_slot(made, 9), expected)
    wrong = save_tiny_adapter(
        directory / "wrong", 1, tensors={"base_model.model.x.nothing.lora_A.weight": torch.zeros(4, 4)}
    )
    try:
        read(made, wrong, 2)
    except ValueError as error:
        found["refused"] = str(error)
    made.adapter_forget(adapter_id=2)
    made.adapter_forget(adapter_id=7)  # of an earlier life
    found["left"] = len(made.model_runner.lora_manager._slipstream_reads)
    return found
