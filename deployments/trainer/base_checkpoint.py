"""The checkpoint that fleet and trainer start from. What the trainer's model lacks (a vision tower,
multi-token prediction) is frozen: sent and stored as it is, so that every version is complete."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from deployments.host.durable_files import replacing
from deployments.protocol.errors import InvalidRequest
from deployments.weights.store.hub import model_files, read_schema, write_model_files
from deployments.weights.store.version_writer import read_tensors, write_safetensors
from deployments.weights.wire.checkpoint_schema import join_reasons

CONFIG = "config.json"


class BaseCheckpoint:
    """`names`: the directory's tensors; `files`: what else it has, read now, as it may be overwritten. Raises
    OSError or ValueError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = model_files(directory)
        self._schema = read_schema(directory) or {}
        self.names: frozenset[str] = frozenset(self._schema)

    def frozen(self, trained: Collection[str]) -> Sequence[str]:
        """Names not in `trained`. Raises ValueError for a module trained in part: a frozen scale would not
        fit its trained weight."""
        frozen = sorted(self.names - set(trained))
        modules = {name.rpartition(".")[0]: name for name in frozen}
        problems = [
            f"{name!r} is trained without {modules[module]!r} of the same module"
            for name in trained
            if (module := name.rpartition(".")[0]) in modules
        ]
        if problems:
            raise ValueError(f"{self.directory} cannot be trained in part: {join_reasons(problems)}")
        return frozen

    def read(self, names: Collection[str], directory: Path) -> dict[str, torch.Tensor]:
        """From this checkpoint or a version of it in `directory`, whose files may then be overwritten."""
        found = read_tensors(directory, names)
        return {name: found[name].to(getattr(torch, self._schema[name].dtype), copy=True) for name in names}

    def write_files(self, directory: Path, model: PreTrainedModel, dtype: str) -> None:
        """All files of a checkpoint but the weights."""
        write_model_files(self.files, directory)
        stored: dict[str, Any] = json.loads(self.files[CONFIG])
        if stored.get("model_type") == model.config.model_type:
            config = type(model.config).from_dict(model.config.to_dict())
            config.dtype = dtype
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(directory)
        else:  # the model is a part, such as a vision-language model's text model
            (directory / CONFIG).write_text(json.dumps(_with_dtype(stored, dtype), indent=2))

    def write(
        self, directory: Path, model: PreTrainedModel, dtype: str, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises InvalidRequest: the directory cannot be written; its weights are unchanged."""
        try:
            self.write_files(directory, model, dtype)
            with replacing(directory / "model.safetensors") as partial:
                write_safetensors(weights, partial)
        except OSError as error:
            raise InvalidRequest(f"the checkpoint cannot be written to {directory}: {error}") from error


def summary(names: Sequence[str]) -> Sequence[str]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group(name), []).append(name)
    return tuple(
        f"{group} ({len(members)} tensors)" if len(members) > 1 else members[0]
        for group, members in groups.items()
    )


def _group(name: str) -> str:
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:2])


def _with_dtype(config: Any, dtype: str) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") else _with_dtype(value, dtype)
        for key, value in config.items()
    }
