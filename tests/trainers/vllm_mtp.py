"""vLLM's multi-token prediction on given hidden states.

In a process of its own: vLLM's parallel state and current configuration are global.
"""

import copy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.utils import is_torchvision_available
from vllm.config import SpeculativeConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.deployments.weights.staging.families import init_parallel_state
from tests.tiny_models import save_tiny_experts
from tests.trainers.vllm_eagle3 import attend


def drafted(model: Path, scratch: Path, tokens: list[int], hidden: Any) -> Any:
    """Logits [T - 1, V] of each position but the last, float32 of numpy. `hidden` is the model's last hidden
    states [T, H]: vLLM's linear attention has no kernel on a CPU."""
    config = EngineArgs(
        model=str(
            save_tiny_experts(scratch / "experts", 0)
        ),  # vLLM cannot inspect Qwen3.5 without torchvision
        skip_tokenizer_init=True,
        max_model_len=64,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 1,
        },  # the drafter's model is the same
    ).create_engine_config()
    described = AutoConfig.from_pretrained(model).get_text_config()
    kind = SpeculativeConfig.hf_config_override(copy.deepcopy(described)).architectures[0]
    config.model_config.hf_config = config.model_config.hf_text_config = described
    init_parallel_state(config, scratch / "rendezvous", "gloo")
    Attention.forward = attend
    without_torchvision()
    with set_current_vllm_config(config), torch.inference_mode(), set_default_torch_dtype(torch.float32):
        drafter = ModelRegistry.models[kind].load_model_cls()(vllm_config=config)
        drafter.load_weights(load_file(model / "model.safetensors").items())
        process_weights_after_loading(drafter, config.model_config, torch.device("cpu"))
        positions = torch.arange(len(tokens) - 1)
        with set_forward_context(None, config):
            made = drafter(torch.tensor(tokens[1:]), positions, torch.from_numpy(hidden)[:-1])
        return drafter.compute_logits(made[0] if isinstance(made, tuple) else made).numpy()


def without_torchvision() -> None:
    """Models that see import it in vLLM, with their processors of images; no image is read here."""
    if is_torchvision_available() or find_spec("torchvision") is not None:
        return
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        parent, _, last = f"torchvision{name}".rpartition(".")
        sys.modules[f"torchvision{name}"] = module = ModuleType(f"torchvision{name}")
        if parent:
            setattr(sys.modules[parent], last, module)
