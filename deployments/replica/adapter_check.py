"""Checks an adapter's files: their digest, and whether they fit this engine's model."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.lora.peft_helper import PEFTHelper

from deployments.protocol.adapters import Adapter
from deployments.weights.store.adapter_store import CONFIG, TENSORS, Incomplete, adapter_digest
from deployments.weights.store.hub import read_schema
from deployments.weights.wire.checkpoint_schema import Schema, TensorSpec, join_reasons
from deployments.weights.wire.digest import is_finite

_PART = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>A|B)\.weight")


def check_adapter(adapter: Adapter, base: Schema | None, lora_config: Any) -> None:
    """Raises Incomplete (missing, or another digest) or ValueError, naming the first few tensors.

    Args:
        base: schema of the engine's initial checkpoint; None if unknown.
    """
    directory = Path(adapter.path)
    with ThreadPoolExecutor(1) as beside:  # both read all bytes and release the GIL
        digesting = beside.submit(adapter_digest, directory)
        try:
            problem = join_reasons(_problems(directory, base, lora_config))
        except (OSError, ValueError) as error:
            problem = str(error)
        try:
            digest = digesting.result()
        except OSError as error:
            raise Incomplete(f"{directory} cannot be read: {error}") from error
    if digest != adapter.digest:
        raise Incomplete(f"{directory} must have the digest {adapter.digest}, and has {digest}")
    if problem:
        raise ValueError(f"{adapter.full_name}: {problem}")


def _problems(directory: Path, base: Schema | None, lora_config: Any) -> list[str]:
    _check_config(directory, lora_config)
    schema = read_schema(directory) or {}
    problems = [*_halves(schema, lora_config.max_lora_rank)]
    if base is not None:
        problems += _misfits(schema, base)
    return problems or _not_finite(directory / TENSORS)


def _check_config(directory: Path, lora_config: Any) -> None:
    try:
        PEFTHelper.from_local_dir(str(directory), None).validate_legal(lora_config)
    except (TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"{CONFIG}: {error}") from error


def _parts(schema: Schema) -> Mapping[str, dict[str, TensorSpec]]:
    parts: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in schema.items():
        match = _PART.fullmatch(name)
        if match is not None:
            parts.setdefault(match["module"], {})[match["half"]] = spec
    return parts


def _halves(schema: Schema, max_rank: int) -> Iterator[str]:
    for module, halves in _parts(schema).items():
        if len(halves) < 2:
            yield f"{module!r} has lora_{next(iter(halves))} alone"
        elif any(len(half.shape) != 2 for half in halves.values()):
            continue  # vLLM checks other layouts
        elif halves["A"].shape[0] != halves["B"].shape[1]:
            shapes = f"{list(halves['A'].shape)} and {list(halves['B'].shape)}"
            yield f"{module!r}: lora_A and lora_B have the shapes {shapes}"
        elif halves["A"].shape[0] > max_rank:
            rank = halves["A"].shape[0]
            yield f"{module!r} has rank {rank}, expected at most max_lora_rank, {max_rank}"


def _misfits(schema: Schema, base: Schema) -> list[str]:
    """Empty if the base has none of these names: its checkpoint renames them, and only vLLM can tell."""
    parts = _parts(schema)
    known = {module for module in parts if f"{module}.weight" in base}
    if not known:
        return []
    problems = [
        f"{module!r} is no module of the base model"
        for module in parts
        if module not in known and ".experts" not in module
    ]
    for module in sorted(known):
        expected, halves = base[f"{module}.weight"].shape, parts[module]
        if len(expected) != 2 or len(halves) < 2 or any(len(half.shape) != 2 for half in halves.values()):
            continue
        got = (halves["B"].shape[0], halves["A"].shape[1])
        if got != expected:
            problems.append(
                f"{module!r} must be for a weight of {list(expected)}, and is for one of {list(got)}: "
                "it is an adapter of another base model"
            )
    return problems


def _not_finite(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return [
                f"{name!r} has a NaN or an infinity"
                for name in tensors.offset_keys()
                if not is_finite(tensors.get_tensor(name))
            ]
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
