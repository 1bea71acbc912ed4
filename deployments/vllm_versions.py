"""What differs between the versions of vLLM that the fleet runs with. With others its import fails.

A trainer engine reads its source by a method `metadata` and by iterating over it until 0.32, and by a cached
property `metadata` and by `iter_full` since 0.33.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

SUPPORTED = ("0.32", "0.33")
VERSION = ".".join(vllm.__version__.split(".")[:2])
if VERSION not in SUPPORTED:
    raise ImportError(f"expected vLLM {' or '.join(SUPPORTED)}, got {vllm.__version__}")
OLD = VERSION == "0.32"

Tensors = Iterator[tuple[str, torch.Tensor]]


def server_parser() -> Any:
    """It loads the server."""
    return import_module(f"vllm.entrypoints.{'launchers' if OLD else 'common'}.cli_args")


class Source(WeightSource):
    """A source of weights for trainer engines of either version. Every rank has every tensor, in full."""

    @abstractmethod
    def specs(self) -> list[ParamMeta]:
        """What an iteration yields, in order."""

    @abstractmethod
    def __iter__(self) -> Tensors: ...

    def iter_full(self) -> Tensors:
        return iter(self)

    def _metadata(self) -> list[ParamMeta]:
        return self.specs()

    metadata: Any = _metadata if OLD else cached_property(_metadata)


def specs_of(source: WeightSource) -> list[ParamMeta]:
    if isinstance(source, Source):
        return source.specs()  # they may change from one connection to the next
    return source.metadata() if OLD else source.metadata


def tensors_of(source: WeightSource) -> Tensors:
    return iter(source) if OLD else source.iter_full()
