"""Replay of the rollout engine's choice of experts (R3, https://arxiv.org/abs/2510.11370).

Trainer and engine round differently: where two experts score almost alike they choose differently, and
log-probabilities differ by more than rounding. All routers of transformers choose with one `topk` over expert
scores. Replay replaces the result; the router's use of it, with gradients, is its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from trainers.trajectory import Trajectory

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    name: str
    module: Any
    layer: int
    experts: int


class RoutingReplay:
    """Costs nothing before the first batch with a choice of experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._installed = False
        self._chosen: torch.Tensor | None = None  # kept for recomputation in the backward pass

    @cached_property
    def _blocks(self) -> list[_Block]:
        found = []
        for name, module in self._model.named_modules():
            experts, layer = getattr(module, "experts", None), _LAYER.search(f"{name}.")
            if layer is not None and isinstance(experts, torch.nn.Module):
                is_list = isinstance(experts, torch.nn.ModuleList)
                count = len(experts) if is_list else getattr(experts, "num_experts", 0)
                found.append(_Block(name=name, module=module, layer=int(layer[1]), experts=count))
        return found

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises ValueError."""
        for number, trajectory in enumerate(trajectories):
            if (routed := trajectory.routed_experts) is None:
                continue
            layers = 1 + max((block.layer for block in self._blocks), default=-1)
            experts = min((block.experts for block in self._blocks), default=0)
            most = int(np.frombuffer(routed.ids, routed.dtype).max(initial=0))
            if layers == 0 or routed.layers < layers or most >= experts:
                raise ValueError(
                    f"trajectory {number}: routed_experts: expected {layers} layers or more, and numbers "
                    f"below {experts}, as {type(self._model).__name__} has experts, got {routed.layers} "
                    f"layers and the number {most}"
                )

    def use(self, chosen: torch.Tensor | None) -> None:
        """Replayed from now on: int16 [R * L, layers, top_k], -1 where a router chooses itself."""
        self._chosen = chosen
        if chosen is not None and not self._installed:
            for block in self._blocks:
                block.module.forward = partial(self._forward, block.module.forward, block)
            self._installed = True

    def _forward(self, forward: Any, block: _Block, *args: Any, **kwargs: Any) -> Any:
        if self._chosen is None:
            return forward(*args, **kwargs)
        with _Replaced(self._chosen[:, block.layer], block.experts) as replaced:
            result = forward(*args, **kwargs)
        if not replaced.found:
            raise ValueError(
                f"routed_experts: expected {block.name} to choose {self._chosen.shape[-1]} of "
                f"{block.experts} experts with one topk"
            )
        return result


class _Replaced(TorchFunctionMode):
    def __init__(self, chosen: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._chosen, self._experts = chosen, experts
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, own = args[0], result[1]
        tokens, top_k = self._chosen.shape
        if scores.ndim != 2 or scores.shape[1] != self._experts or own.shape[1] != top_k:
            return result  # a `topk` over groups of experts, or in attention
        self.found = True
        if len(own) != tokens:  # the output head's probe
            return result
        ids = torch.where(self._chosen < 0, own, self._chosen.to(own.dtype))
        return torch.return_types.topk((scores.gather(1, ids), ids))
