"""Differences between the supported versions of vLLM. The import fails with others.

A trainer engine reads its source by a method `metadata` and by iteration until 0.32, by a cached property
`metadata` and `iter_full` since 0.33.
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
    """Loads the server."""
    return import_module(f"vllm.entrypoints.{'launchers' if OLD else 'common'}.cli_args")


class Source(WeightSource):
    """A source of weights for either version's trainer engines. Every rank has every tensor, in full."""

    @abstractmethod
    def specs(self) -> list[ParamMeta]:
        """What an iteration yields, in order."""

    @abstractmethod
    def __iter__(self) -> Tensors:
        """What it has yielded stays as it is until the end: a buffer that is filled again would be sent with
        what it has then."""

    def iter_full(self) -> Tensors:
        return iter(self)

    def _metadata(self) -> list[ParamMeta]:
        return self.specs()

    metadata: Any = _metadata if OLD else cached_property(_metadata)


def specs_of(source: WeightSource) -> list[ParamMeta]:
    if isinstance(source, Source):
        return source.specs()  # they may change between connections
    return source.metadata() if OLD else source.metadata


def tensors_of(source: WeightSource) -> Tensors:
    return iter(source) if OLD else source.iter_full()
