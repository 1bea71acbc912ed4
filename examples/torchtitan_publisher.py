"""Publishes torchtitan's checkpoints as its trainer writes them: sharded, without a converted copy on disk.

    python -m examples.torchtitan_publisher outputs/checkpoint/step-100 torchtitan.models.qwen3 1.7B

torch's `distributed.checkpoint` reads a layer at a time, and torchtitan's own adapter gives it the names and
shapes of Hugging Face. The metadata are a pickle: read only what you trust.
"""

import importlib
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
import typer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from vllm.distributed.weight_transfer import ParamMeta

from app.client.connection import FleetError, token_from
from app.client.program_options import LOCAL_URL, Url, parse
from examples.http_publisher import ON_CPU, Backend
from slipstream.publisher import Publisher, Source
from trainers.sources import layer_groups

SHM = Backend("shm")
LOOK_S = 2.0  # between looks for a new step
STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")  # beside the model's


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchtitanOptions:
    """Publishes torchtitan's checkpoints as its trainer writes them: sharded, without a converted copy."""

    checkpoint: Annotated[Path, typer.Argument(help="a step's directory; with --follow that of all steps")]
    module: Annotated[str, typer.Argument(help="whose `model_registry` knows the flavor")]
    flavor: Annotated[str, typer.Argument()]
    follow: Annotated[bool, typer.Option(help="publish the newest step whenever one is complete")] = False
    dtype: Annotated[Literal["auto", "bfloat16", "float16"], typer.Option(help="sent; auto: as stored")] = (
        "auto"
    )
    transport: Annotated[Backend, typer.Option(help="as the fleet is configured")] = SHM
    url: Url = LOCAL_URL


class TorchtitanCheckpoint(Source):
    """A step of a model (torchtitan's ModelSpec). Raises OSError: it is not complete, or changes while it is
    read; ValueError: it is of another model. `dtype` None: as stored."""

    def __init__(
        self, directory: Path, spec: Any, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self._directory, self._device, self._dtype = directory, device, dtype
        if not (directory / ".metadata").is_file():
            raise OSError(f"expected a complete checkpoint of torchtitan, with .metadata, got {directory}")
        self._files = self._listing()
        self._reader = dcp.FileSystemReader(directory)
        self._reader.read_metadata = cache(self._reader.read_metadata)  # each load of a layer reads all of it
        try:
            self._stored = self._reader.read_metadata().state_dict_metadata
        except (AttributeError, EOFError, UnpicklingError) as error:
            raise OSError(f"{directory}/.metadata is not torch's: {error}") from error
        with torch.device("meta"):
            shapes = {name: list(tensor.shape) for name, tensor in spec.model.build().state_dict().items()}
        tensors = {
            name: each for name, each in self._stored.items() if isinstance(each, TensorStorageMetadata)
        }
        found = {name: list(each.size) for name, each in tensors.items() if not name.startswith(STATES)}
        if wrong := [name for name in shapes | found if shapes.get(name) != found.get(name)]:
            raise ValueError(
                f"{directory} is not of {spec.name} {spec.flavor}: {len(wrong)} tensors differ, first "
                f"{wrong[0]!r}: expected {shapes.get(wrong[0])}, got {found.get(wrong[0])}"
            )
        self._groups = layer_groups(list(shapes))
        self._adapter = spec.state_dict_adapter(spec.model, None)

    def specs(self) -> list[ParamMeta]:
        tensors = (each for group in self._groups for each in self._converted(self._empty(group, "meta")))
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups:
            state = self._empty(group, self._device)
            try:
                dcp.load(state, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:
                raise OSError(f"{self._directory} cannot be read: {error.failures[0][0]}") from error
            if self._listing() != self._files:  # here: the publisher takes the last tensor, and no end
                raise OSError(f"{self._directory} was written while it was read")
            yield from self._converted(state)

    def _empty(self, names: list[str], device: str) -> dict[str, torch.Tensor]:
        stored = {name: self._stored[name] for name in names}
        return {n: torch.empty(t.size, dtype=t.properties.dtype, device=device) for n, t in stored.items()}

    def _converted(self, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._adapter.to_hf(state).items():
            yield name, tensor.to(self._dtype or tensor.dtype)

    def _listing(self) -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in self._directory.iterdir()}
        return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


def publish(options: TorchtitanOptions, directory: Path) -> None:
    begin, transport = time.perf_counter(), options.transport.value
    try:
        spec = importlib.import_module(options.module).model_registry(options.flavor)
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{options.module} has no flavor {options.flavor!r}: {error!r}") from error
    source = TorchtitanCheckpoint(
        directory,
        spec,
        "cpu" if transport in ON_CPU else "cuda",
        None if options.dtype == "auto" else getattr(torch, options.dtype),
    )
    with Publisher(options.url, source, transport=transport, token=token_from()) as publisher:
        version = publisher.publish().version
    print(f"{directory}: version {version} in {time.perf_counter() - begin:.2f} s", flush=True)


def follow(options: TorchtitanOptions) -> None:
    """`.metadata` is what torchtitan writes last. It may remove a step at any time."""
    last = 0
    while True:
        try:
            complete = [
                (path.stat().st_mtime_ns, path) for path in options.checkpoint.glob("step-*/.metadata")
            ]
            written, metadata = max(complete, default=(0, Path()))
            if written > last:
                last = written
                publish(options, metadata.parent)
        except OSError as error:
            print(f"not published: {error}", flush=True)
        time.sleep(LOOK_S)


def main() -> None:
    options = parse(TorchtitanOptions)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    (follow(options) if options.follow else publish(options, options.checkpoint))


if __name__ == "__main__":
    try:
        main()
    except (FleetError, ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"torchtitan_publisher: {error}")
