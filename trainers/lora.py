"""LoRA (https://arxiv.org/abs/2106.09685) with peft: a model's adapter, and its files.

The adapter is float32 over a base of any dtype: bfloat16 would round small updates away.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from trainers.settings import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
PREFIX = "base_model.model."  # prefix of names in peft's files
_NAME = "default"  # peft's name of the adapter
_WRAPPED = ".base_layer."  # part of peft's names of base tensors
_HALVES = tuple(f".lora_{half}.{_NAME}.weight" for half in "AB")
_WRITTEN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names


class LoraAdapter:
    """A model's adapter, the only part trained. Create it before the first forward pass of a sharded model,
    with the same `seed` on all ranks. Raises ValueError if no linear layer has a name in `target_modules`."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
        # Imports in seconds.
        from peft import LoraConfig as PeftConfig

        self._model = model
        self._seed = seed
        self._config = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=_targets(model, config.target_modules),
            exclude_modules=[name for name, decodes in _linear(model).items() if not decodes] or None,
        )
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model.add_adapter(self._config, _NAME)
        for parameter in self.parameters():
            parameter.data = parameter.data.float()

    def tensors(self) -> dict[str, nn.Parameter]:
        return {
            f"{PREFIX}{name.replace(f'.{_NAME}.', '.')}": parameter
            for name, parameter in self._model.named_parameters()
            if name.endswith(_HALVES)
        }

    def parameters(self) -> list[nn.Parameter]:
        return list(self.tensors().values())

    def modules(self) -> list[str]:
        names = (name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in self.tensors())
        return list(dict.fromkeys(names))

    def base_state(self, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
        state = self._model.state_dict(keep_vars=keep_vars)
        return {
            name.replace(_WRAPPED, "."): tensor
            for name, tensor in state.items()
            if not name.endswith(_HALVES)
        }

    @torch.no_grad()
    def delta(self, name: str) -> torch.Tensor | None:
        """The adapter's addition to a tensor of `base_state`, float32; None: nothing."""
        layer = self._layers.get(name)
        return None if layer is None else layer.get_delta_weight(_NAME)

    def reset(self) -> None:
        """The same on all ranks."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            for layer in self._layers.values():
                halves = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
                first = nn.Linear(halves[0].shape[1], halves[0].shape[0], bias=False)  # peft's initial values
                halves[0].data.copy_(first.weight)
                halves[1].data.zero_()

    @cached_property
    def _layers(self) -> dict[str, Any]:
        return {f"{module}.weight": self._model.get_submodule(module) for module in self.modules()}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Forward passes of the base alone."""
        self._model.disable_adapters()
        try:
            yield
        finally:
            self._model.enable_adapters()

    def files(
        self, *, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Bytes of peft's two files, uint8 [size] on the tensors' device; equal for equal tensors. `dtype`
        None: float32."""
        return {
            CONFIG: _as_tensor(json.dumps(self._written(), indent=2, sort_keys=True).encode()),
            TENSORS: safetensors_file(
                self.tensors(), dtype=dtype or torch.float32, metadata={"format": "pt", **(metadata or {})}
            ),
        }

    def write(self, directory: Path) -> None:
        for name, content in self.files().items():
            with (directory / name).open("wb") as file:
                file.write(memoryview(content.cpu().numpy()))
                file.flush()
                os.fsync(file.fileno())

    def read(self, directory: Path) -> dict[str, torch.Tensor]:
        """Raises ValueError for other settings."""
        written = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        own = self._written()
        for key in ("r", "lora_alpha", "target_modules"):
            if written.get(key) != own[key]:
                raise ValueError(f"{key!r} must be {own[key]}, got {written.get(key)}")
        values = load_file(directory / TENSORS)
        self.check(values)
        return values

    @torch.no_grad()
    def restore(self, values: Mapping[str, torch.Tensor]) -> None:
        self.check(values)
        for name, parameter in self.tensors().items():
            parameter.copy_(values[name])

    def check(self, values: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for other names or shapes."""
        own = self.tensors()
        wrong = sorted(own.keys() ^ values.keys())
        wrong += [name for name in own.keys() & values.keys() if own[name].shape != values[name].shape]
        if wrong:
            raise ValueError(f"{len(wrong)} tensors are of another adapter or base, first {wrong[0]!r}")

    def _written(self) -> dict[str, Any]:
        made = {**self._config.to_dict(), "inference_mode": True}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in made.items()}


def _linear(model: PreTrainedModel) -> dict[str, bool]:
    decoder = {id(module) for module in model.get_decoder().modules()}
    return {
        name: id(module) in decoder
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not model.get_output_embeddings()
    }


def _targets(model: PreTrainedModel, wanted: tuple[str, ...] | None) -> list[str]:
    known = sorted({name.rpartition(".")[2] for name, decodes in _linear(model).items() if decodes})
    if wanted is None:
        return known
    wrong = [name for name in wanted if name not in known]
    if wrong:
        raise ValueError(
            f"'trainer.lora.target_modules': expected linear layers of this model ({', '.join(known)}), "
            f"got {wrong[0]!r}"
        )
    return sorted(set(wanted))


def safetensors_file(
    tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, metadata: Mapping[str, str]
) -> torch.Tensor:
    """A safetensors file, uint8 [size], of tensors of one device, complete on return.
    `safetensors.torch.save` orders metadata randomly, so ranks would differ."""
    names = sorted(tensors)
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * dtype.itemsize
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _WRITTEN[dtype], "shape": shape, "data_offsets": [begin, end]}
    written = json.dumps(header, separators=(",", ":")).encode()
    written = written.ljust(-(-len(written) // 8) * 8)  # aligns tensors
    start = _as_tensor(len(written).to_bytes(8, "little") + written)
    device = tensors[names[0]].device
    file = torch.empty(len(start) + end, dtype=torch.uint8, device=device)
    file[: len(start)].copy_(start)
    values, at = file[len(start) :].view(dtype), 0
    for name in names:
        size = tensors[name].numel()
        values[at : at + size].copy_(tensors[name].detach().reshape(-1))
        at += size
    if device.type == "cuda":  # other streams read it
        torch.cuda.current_stream(device).synchronize()
    return file


def _as_tensor(content: bytes) -> torch.Tensor:
    """uint8 [size]; torch needs writable memory."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
