"""A policy and its drafter as one module, staged and swapped together.

A drafter with a checkpoint of its own (EAGLE, EAGLE-3, a draft model) is published as `drafter.<name in its
checkpoint>`. One in the served checkpoint (MTP) is offered every tensor and takes its own.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deployments.weights.store.versions import DRAFTER, DRAFTER_DIRECTORY

METHODS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
_FLAGS = ("has_own_lm_head", "has_own_embed_tokens")  # vLLM sets them while it loads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    vllm_config: Any
    model_config: Any
    prefix: str


_made: "WeakKeyDictionary[torch.nn.Module, _Made]" = WeakKeyDictionary()


def install() -> None:
    """vLLM's loader tells a transfer engine of the policy alone; note how it makes models."""
    if "vllm.v1.worker.worker_base" not in sys.modules:
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load = BaseModelLoader.load_model
    if load.__module__ == __name__:  # it runs more than once
        return

    def load_model(loader: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        config, speculative = model_config, vllm_config.speculative_config
        if speculative is not None and model_config is speculative.draft_model_config:
            # A draft model's `vllm_config` has its own config in place of the policy's.
            stored = Path(speculative.target_model_config.model) / DRAFTER_DIRECTORY
            if stored.is_dir():  # a stored version's drafter; its config is the fleet's
                config = _at(model_config, str(stored))
        model: torch.nn.Module = load(loader, vllm_config, config, prefix)
        _made[model] = _Made(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        return model

    BaseModelLoader.load_model = load_model


class PolicyAndDrafter(torch.nn.Module):
    """`shared`: paths of the drafter's modules that are the policy's (embeddings, output head), with their
    paths there. `own_checkpoint`: the drafter has one."""

    def __init__(
        self,
        policy: torch.nn.Module,
        drafter: torch.nn.Module,
        *,
        own_checkpoint: bool,
        shared: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.policy, self.drafter = policy, drafter
        self.own_checkpoint = own_checkpoint
        self.shared = shared

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        policy, drafter = [], []
        for name, tensor in weights:
            of_drafter = name.startswith(DRAFTER)
            if not of_drafter:
                policy.append((name, tensor))
            if of_drafter or not self.own_checkpoint:
                drafter.append((name.removeprefix(DRAFTER), tensor))
        if policy:
            self.policy.load_weights(policy)
        if drafter := [(name, tensor) for name, tensor in drafter if not self.shares(name)]:
            self.drafter.load_weights(drafter)

    def shares(self, name: str) -> bool:
        module = name.rpartition(".")[0].rpartition(".")[2]
        return any(path.rpartition(".")[2] == module for path in self.shared)

    @torch.no_grad()
    def copy_drafter(self, live: torch.nn.Module) -> None:
        sources = dict(live.named_parameters())
        for name, parameter in self.named_parameters():
            if name.startswith(DRAFTER):
                parameter.copy_(sources[name])


def with_drafter(vllm_config: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Raises ValueError."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in METHODS_WITHOUT_WEIGHTS:
        return model
    method, config = speculative.method, speculative.draft_model_config
    drafters = [each for each, made in _made.items() if made.model_config is config]
    if len(drafters) != 1:
        raise ValueError(
            f"updates would not reach the drafter of speculative decoding with method {method!r}: expected "
            f"one model that vLLM loaded for it, found {len(drafters)}; use another method, or no "
            "speculative decoding"
        )
    if speculative.parallel_drafting:
        raise ValueError("a drafter with 'parallel_drafting' cannot be updated; do without")
    paths = {
        id(module): path
        for path, module in model.named_modules()
        if next(module.parameters(), None) is not None
    }
    shared = {
        path: paths[id(module)]
        for path, module in drafters[0].named_modules(remove_duplicate=False)
        if id(module) in paths
    }
    own_checkpoint = config.model != vllm_config.model_config.model
    return PolicyAndDrafter(model, drafters[0], own_checkpoint=own_checkpoint, shared=shared)


def second_instance(vllm_config: Any, live: torch.nn.Module) -> torch.nn.Module:
    """Construct the live model again, with what it shares. `vllm_config`: see `second_instance_config`."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from deployments.weights.staging.base import second_instance_config

    policy = initialize_model(vllm_config).eval()
    if not isinstance(live, PolicyAndDrafter):
        return policy
    made = _made[live.drafter]
    with set_default_torch_dtype(made.model_config.dtype):
        drafter = initialize_model(
            second_instance_config(made.vllm_config), model_config=made.model_config, prefix=made.prefix
        ).eval()
    for path, source in live.shared.items():
        parent, _, name = path.rpartition(".")
        setattr(drafter.get_submodule(parent), name, policy.get_submodule(source))
    for flag in _FLAGS:
        if flag in vars(live.drafter):
            setattr(drafter, flag, vars(live.drafter)[flag])
    return PolicyAndDrafter(policy, drafter, own_checkpoint=live.own_checkpoint, shared=live.shared)


def checkpoint_tensors(
    vllm_config: Any, model: torch.nn.Module, path: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a directory, which becomes the model's configured one. A version without a drafter gets the
    tensors of the configured drafter."""
    if not isinstance(model, PolicyAndDrafter):
        config = vllm_config.model_config
        config.model, config.model_weights, config.revision = path, "", None
        yield from _read(vllm_config.load_config, config, model)
        return
    yield from checkpoint_tensors(vllm_config, model.policy, path)
    if model.own_checkpoint:
        config = vllm_config.speculative_config.draft_model_config
        if (stored := Path(path) / DRAFTER_DIRECTORY).is_dir():
            config = _at(config, str(stored))
        for name, tensor in _read(vllm_config.load_config, config, model.drafter):
            yield DRAFTER + name, tensor


def _at(model_config: Any, path: str) -> Any:
    config = copy.copy(model_config)
    config.model, config.model_weights, config.revision = path, "", None
    return config


def _read(load_config: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ValueError(f"a checkpoint cannot be loaded with load_format {load_config.load_format!r}")
    yield from loader.get_all_weights(model_config, model)
