"""The engine's part in adapters, and adapters to load, for the tests of one replica."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.lora import LoRAConfig

from deployments.protocol.adapters import Adapter
from deployments.weights.store.adapter_store import adapter_digest
from tests.tiny_adapters import tiny_adapter_tensors

CONFIG = LoRAConfig(max_lora_rank=8)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def adapter(directory: Path, number: int = 1, name: str = "math") -> Adapter:
    digest = adapter_digest(directory)
    return Adapter(
        name=name, version=number, adapter_id=number, path=str(directory), digest=digest, size_bytes=1
    )


def changed(**tensors: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tiny adapter, but these; None: without."""
    made = tiny_adapter_tensors(1)
    for name, tensor in tensors.items():
        if tensor is None:
            del made[name]
        else:
            made[name] = tensor
    return made


class FakeLlm:
    """As `AsyncLLM`: loads what is there, fails otherwise, and loads nothing twice under an id."""

    def __init__(self, model: str) -> None:
        self.vllm_config = SimpleNamespace(lora_config=CONFIG, load_config=SimpleNamespace(download_dir=None))
        self.model_config = SimpleNamespace(model=model, revision=None, max_model_len=64)
        self.renderer = self.input_processor = None  # of no matter to adapters
        self.loaded: dict[int, str] = {}
        self.fails = False
        self.logger_manager: Any = None
        self.reading: dict[int, int] = {}  # id -> how often it was asked for
        self.torn = False
        self.read_from: dict[int, str] = {}
        self.unreadable = ""
        self.reads = 0

    async def workers(self, method: str, adapter_id: int, **arguments: Any) -> list[Any]:
        match method:
            case "adapter_read":
                self.reading[adapter_id] = 0
                self.reads += 1
                self.read_from[adapter_id] = arguments["path"]
            case "adapter_is_read":
                self.reading[adapter_id] += 1
                if self.torn or self.read_from[adapter_id] == self.unreadable:
                    raise Exception("Call to collective_rpc method failed:\nunexpected module")
                return [True, self.reading[adapter_id] > 2]  # one of two workers takes longer
            case "adapter_forget":
                self.reading.pop(adapter_id, None)
        return [None, None]

    async def add_lora(self, request: Any) -> bool:
        assert not request.load_inplace
        assert self.reading.pop(request.lora_int_id) > 2, "read by the engine, between two steps"
        assert request.lora_int_id not in self.loaded, "vLLM would keep the former one"
        self.loaded[request.lora_int_id] = request.lora_path
        if self.fails:  # in its activation: the files are in the engine's cache already
            raise Exception("Call to add_lora method failed:\nsize mismatch")
        return True

    async def remove_lora(self, adapter_id: int) -> bool:
        return self.loaded.pop(adapter_id, None) is not None
