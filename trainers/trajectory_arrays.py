"""Trajectories as arrays in the safetensors format, for HTTP and Ray's object store.

prompt_lengths     integers [N]       tokens of each prompt
prompt_token_ids   integers [P]       all prompts, concatenated
lengths            integers [N]       tokens of each completion
token_ids          integers [T]       all completions, concatenated
logprobs           floats [T]
advantages         floats [N] or [T]  of completions, or of tokens
loss_mask          booleans or integers [T]; optional
constrained        booleans or integers [T]; optional
weight_versions    integers [S, 4]; optional: trajectory, version, start and end of each span
image_lengths      integers [K]       bytes of each image file; optional
image_bytes        integers [B]       all files, concatenated, uint8; each one once
images             integers [I, 2]    trajectory and file, in the order of the placeholders
routed_experts     uint8 or uint16 [R, layers, top_k]; optional: ids of `trajectory.RoutedExperts`
teacher_token_ids  integers [T, top_k]; optional: `trajectory.TeacherLogprobs`
teacher_logprobs   floats [T, top_k]; optional

The metadata may have `settings`, JSON of `trainers.settings.StepSettings`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trainers.trajectory import RoutedExperts, TeacherLogprobs, Trajectory, VersionSpan

MEDIA_TYPE = "application/x-safetensors"
SETTINGS = "settings"  # metadata key

Array = npt.NDArray[np.generic]
_KINDS = {"integers": "iu", "floats": "f", "booleans or integers": "biu"}
_REQUIRED = dict.fromkeys(("prompt_lengths", "prompt_token_ids", "lengths", "token_ids"), "integers")
_OF_ROLLOUTS = {"logprobs": "floats", "advantages": "floats"}
_MASKS = {"loss_mask": True, "constrained": False}  # defaults
_ROWS = {
    "weight_versions": ("rows", 4),
    "images": ("rows", 2),
    "routed_experts": ("positions", "layers", "top_k"),
    "teacher_token_ids": ("tokens", "top_k"),
    "teacher_logprobs": ("tokens", "top_k"),
}
_IMAGES = ("image_lengths", "image_bytes", "images")
_OPTIONAL = dict.fromkeys(_MASKS, "booleans or integers") | dict.fromkeys((*_ROWS, *_IMAGES), "integers")
_OPTIONAL["teacher_logprobs"] = "floats"


def to_bytes(trajectories: Sequence[Trajectory], settings: str | None = None) -> bytes:
    """Fractions become float32. `settings` is JSON of `StepSettings`."""
    lengths = [len(each.token_ids) for each in trajectories]
    arrays: dict[str, Array] = {
        "prompt_lengths": np.array([len(each.prompt_token_ids) for each in trajectories], np.int32),
        "prompt_token_ids": _joined([each.prompt_token_ids for each in trajectories], np.int32),
        "lengths": np.array(lengths, np.int32),
        "token_ids": _joined([each.token_ids for each in trajectories], np.int32),
        "logprobs": _joined([each.logprobs for each in trajectories], np.float32),
    }
    by_token = any(isinstance(each.advantage, tuple) for each in trajectories)
    advantages = [each.advantage for each in trajectories]
    arrays["advantages"] = _joined(map(_filled, advantages, lengths if by_token else repeat(1)), np.float32)
    for name, default in _MASKS.items():
        masks = [getattr(each, name) for each in trajectories]
        if any(mask is not None for mask in masks):
            masks = [default if mask is None else mask for mask in masks]
            arrays[name] = _joined(map(_filled, masks, lengths), np.bool_)
    spans = [
        (index, span.version, span.start, span.end)
        for index, each in enumerate(trajectories)
        for span in each.weight_versions
    ]
    if spans:
        arrays["weight_versions"] = np.array(spans, np.int64)
    images = dict.fromkeys(content for each in trajectories for content in each.images)
    files = {content: number for number, content in enumerate(images)}
    if files:
        arrays["image_lengths"] = np.array([*map(len, files)], np.int64)
        arrays["image_bytes"] = np.frombuffer(b"".join(files), np.uint8)
        rows = [(i, files[each]) for i, of in enumerate(trajectories) for each in of.images]
        arrays["images"] = np.array(rows, np.int64)
    routed = [each.routed_experts for each in trajectories if each.routed_experts is not None]
    if routed and len(routed) == len(trajectories):  # others are from before the engines returned them
        ids = np.frombuffer(b"".join(each.ids for each in routed), routed[0].dtype)
        arrays["routed_experts"] = ids.reshape(-1, routed[0].layers, routed[0].top_k)
    teachers = [each.teacher for each in trajectories if each.teacher is not None]
    if len(teachers) == len(trajectories) and len({each.top_k for each in teachers}) == 1:
        for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32)):
            values = np.frombuffer(b"".join(getattr(each, name) for each in teachers), dtype)
            arrays[f"teacher_{name}"] = values.reshape(-1, teachers[0].top_k)
    return save(arrays, None if settings is None else {SETTINGS: settings})


def settings_of(content: bytes) -> str | None:
    """In the metadata. Raises ValueError."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    try:
        found: str | None = json.loads(header).get("__metadata__", {}).get(SETTINGS)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected trajectories as arrays in the safetensors format: {error}") from error
    return found


def from_bytes(content: bytes, *, sampled: bool = True) -> list[Trajectory]:
    """`parse_trajectories` checks them; `sampled` as in `Trajectory.from_json`. Raises ValueError."""
    try:
        arrays: Mapping[str, Array] = load(content)
    except KeyError as error:
        raise ValueError(f"expected integers, floats and booleans that numpy has, got {error}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"expected trajectories as arrays in the safetensors format: {error}") from error
    _check(arrays, sampled=sampled)
    prompt_lengths, lengths = arrays["prompt_lengths"], arrays["lengths"]
    count, tokens = len(lengths), sum(lengths.tolist())  # numpy could overflow
    sizes = {"prompt_lengths": count, "prompt_token_ids": sum(prompt_lengths.tolist())}
    sizes |= dict.fromkeys(("token_ids", "logprobs", *_MASKS), tokens)
    for name, expected in sizes.items():
        if name in arrays and len(arrays[name]) != expected:
            raise ValueError(f"{name}: expected [{expected}], got [{len(arrays[name])}]")
    zeros = np.zeros(tokens, np.float32)
    advantages = arrays.get("advantages", np.zeros(count, np.float32))
    if len(advantages) not in (count, tokens):
        raise ValueError(f"advantages: expected [{count}] or [{tokens}], got [{len(advantages)}]")
    prompts = _parts(arrays["prompt_token_ids"], prompt_lengths)
    completions = _parts(arrays["token_ids"], lengths)
    logprobs = _parts(arrays.get("logprobs", zeros), lengths)
    masks, constrained = (_masks(arrays.get(name), lengths) for name in _MASKS)
    values = advantages.tolist() if len(advantages) == count else _parts(advantages, lengths)
    spans = _spans(arrays.get("weight_versions"), count)
    images = _images(arrays, count)
    routed = _routed(arrays.get("routed_experts"), prompt_lengths, lengths)
    teachers = _teachers(arrays.get("teacher_token_ids"), arrays.get("teacher_logprobs"), lengths)
    return [
        Trajectory(
            prompt_token_ids=prompts[index],
            token_ids=completions[index],
            logprobs=logprobs[index],
            advantage=values[index],
            weight_versions=tuple(spans[index]),
            loss_mask=masks[index],
            constrained=constrained[index],
            images=tuple(images[index]),
            routed_experts=routed[index],
            teacher=teachers[index],
        )
        for index in range(count)
    ]


def _filled(value: float | Sequence[float], length: int) -> Sequence[float]:
    return (value,) * length if isinstance(value, float | int) else value


def _joined(parts: Iterable[Sequence[float]], dtype: npt.DTypeLike) -> Array:
    return np.concatenate([np.array(part, dtype) for part in parts] or [np.zeros(0, dtype)])


def _parts(values: Array, lengths: Array) -> list[tuple[int, ...]]:
    ends = np.cumsum(lengths).tolist()
    return [tuple(values[start:end].tolist()) for start, end in pairwise([0, *ends])]


def _masks(values: Array | None, lengths: Array) -> list[tuple[bool, ...] | None]:
    if values is None:
        return [None] * len(lengths)
    return [tuple(map(bool, part)) for part in _parts(values, lengths)]


def _check(arrays: Mapping[str, Array], *, sampled: bool) -> None:
    required = _REQUIRED | (_OF_ROLLOUTS if sampled else {})
    known = _REQUIRED | _OF_ROLLOUTS | _OPTIONAL
    for name in required:
        if name not in arrays:
            raise ValueError(f"expected the array {name!r}, got {sorted(arrays)}")
    for name, array in arrays.items():
        if name not in known:
            raise ValueError(f"expected no other arrays than {sorted(known)}, got {name!r}")
        if array.dtype.kind not in _KINDS[known[name]]:
            raise ValueError(f"{name}: expected {known[name]}, got {array.dtype}")
        shape = _ROWS.get(name)
        expected = "one dimension" if shape is None else f"[{', '.join(map(str, shape))}]"
        sizes = ("",) if shape is None else shape
        if len(sizes) != array.ndim or any(
            isinstance(each, int) and each != size for each, size in zip(sizes, array.shape, strict=True)
        ):
            raise ValueError(f"{name}: expected {expected}, got {list(array.shape)}")
    for name in ("prompt_lengths", "lengths", "image_lengths"):
        if name in arrays and (arrays[name].astype(np.int64) < 0).any():
            raise ValueError(f"{name}: expected lengths, got {arrays[name].min()}")
    if 0 < len(arrays.keys() & set(_IMAGES)) < len(_IMAGES):
        raise ValueError(f"expected all of {', '.join(_IMAGES)}, or none, got {sorted(arrays)}")


def _routed(ids: Array | None, prompts: Array, lengths: Array) -> list[RoutedExperts | None]:
    if ids is None:
        return [None] * len(lengths)
    if ids.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"routed_experts: expected uint8 or uint16, got {ids.dtype}")
    _, layers, top_k = ids.shape
    positions = [
        prompt + length - 1 for prompt, length in zip(prompts.tolist(), lengths.tolist(), strict=True)
    ]
    if sum(positions) != len(ids) or min(positions, default=0) < 0:
        raise ValueError(f"routed_experts: expected {sum(positions)} positions, got {len(ids)}")
    dtype: Any = str(ids.dtype)
    parts = np.split(ids, np.cumsum(positions)[:-1])
    return [RoutedExperts(layers=layers, top_k=top_k, dtype=dtype, ids=part.tobytes()) for part in parts]


def _teachers(ids: Array | None, logprobs: Array | None, lengths: Array) -> list[TeacherLogprobs | None]:
    if ids is None and logprobs is None:
        return [None] * len(lengths)
    tokens = sum(lengths.tolist())
    if ids is None or logprobs is None or ids.shape != logprobs.shape or len(ids) != tokens:
        shapes = [None if each is None else list(each.shape) for each in (ids, logprobs)]
        raise ValueError(
            f"teacher_token_ids, teacher_logprobs: expected both [{tokens}, top_k], got {shapes[0]} and "
            f"{shapes[1]}"
        )
    parts = [
        np.split(each.astype(dtype), np.cumsum(lengths)[:-1])
        for each, dtype in ((ids, np.int32), (logprobs, np.float32))
    ]
    return [
        TeacherLogprobs(top_k=ids.shape[1], token_ids=of_ids.tobytes(), logprobs=of_logprobs.tobytes())
        for of_ids, of_logprobs in zip(*parts, strict=True)
    ]


def _spans(rows: Array | None, count: int) -> dict[int, list[VersionSpan]]:
    spans: dict[int, list[VersionSpan]] = defaultdict(list)
    for index, version, start, end in [] if rows is None else rows.tolist():
        if not 0 <= index < count:
            raise ValueError(f"weight_versions: expected trajectories in [0, {count}), got {index}")
        spans[index].append(VersionSpan(version=version, start=start, end=end))
    return spans


def _images(arrays: Mapping[str, Array], count: int) -> dict[int, list[bytes]]:
    images: dict[int, list[bytes]] = defaultdict(list)
    if "images" not in arrays:
        return images
    lengths, content = arrays["image_lengths"], arrays["image_bytes"]
    if content.dtype != np.uint8 or len(content) != sum(lengths.tolist()):
        raise ValueError(
            f"image_bytes: expected uint8 [{sum(lengths.tolist())}], got {content.dtype} [{len(content)}]"
        )
    ends = np.cumsum(lengths).tolist()
    files = [content[start:end].tobytes() for start, end in pairwise([0, *ends])]
    for index, number in arrays["images"].tolist():
        if not (0 <= index < count and 0 <= number < len(files)):
            raise ValueError(
                f"images: expected trajectories in [0, {count}) and files in [0, {len(files)}), "
                f"got [{index}, {number}]"
            )
        images[index].append(files[number])
    return images
