"""Sampled completions with advantages, validated before a step."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Base64Bytes, BeforeValidator, Field, Strict, TypeAdapter, ValidationError

MAX_NAMED = 3  # problems in a message
Integer: TypeAlias = Annotated[int, Strict()]
Number: TypeAlias = Annotated[float, Strict()]


def _image_file(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(
            value.partition(",")[2] if value.startswith("data:") else value, validate=True
        )
    except binascii.Error as error:
        raise ValueError(f"expected an image file in base64 or a data URL: {error}") from error


ImageFile: TypeAlias = Annotated[bytes, Strict(), BeforeValidator(_image_file)]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """This version of the weights sampled tokens [start, end)."""

    version: Integer
    start: Integer
    end: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """What the routers of the rollout engine chose, see `trainers.routing_replay`.

    Attributes:
        layers: all of the model; those without experts are not read.
        ids: numbers of experts [positions, layers, top_k], base64 in JSON. The positions are those of prompt
            and completion but the last one, which predicts nothing.
    """

    layers: Integer
    top_k: Integer
    dtype: Literal["uint8", "uint16"]
    ids: Base64Bytes

    @property
    def position_bytes(self) -> int:
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobs:
    """A teacher's most probable tokens at each token of a completion, see `trainers.losses.divergence`.

    Attributes:
        top_k: tokens at each one, which differ.
        token_ids: int32 [tokens, top_k], base64 in JSON.
        logprobs: float32 [tokens, top_k], base64 in JSON; at temperature 1, of the whole vocabulary.
    """

    top_k: Annotated[Integer, Field(ge=1)]
    token_ids: Base64Bytes
    logprobs: Base64Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A sampled completion and its advantage. A conversation is one trajectory; users' and tools' tokens are
    in `token_ids`, masked."""

    prompt_token_ids: tuple[Integer, ...]
    token_ids: tuple[Integer, ...]
    # From the rollout engine's sampling; any number where the mask is false.
    logprobs: tuple[Number, ...]
    advantage: Number | tuple[Number, ...]  # one number, or one per token
    weight_versions: tuple[VersionSpan, ...] = ()
    loss_mask: tuple[bool, ...] | None = None  # whether each token is learned from; None: all are
    # Whether a grammar (tool_choice, a regular expression) limited the choice: vLLM then reports the
    # log-probability among fewer tokens, not the policy's. None: no token.
    constrained: tuple[bool, ...] | None = None
    # Files in the order of their placeholders, which are in the prompt, or masked. Trajectories share them.
    images: tuple[ImageFile, ...] = ()
    routed_experts: RoutedExperts | None = None  # None: the trainer's routers choose
    teacher: TeacherLogprobs | None = None  # read by losses that distil

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, sampled: bool = True) -> Self:
        """`sampled` False: `logprobs` and `advantage` may be missing. Raises ValueError, which names the
        field."""
        if not sampled:
            tokens = entry.get("token_ids")
            count = len(tokens) if isinstance(tokens, Sequence) else 0
            entry = {"logprobs": (0.0,) * count, "advantage": 0.0} | dict(entry)
        try:
            return _reader().validate_python(dict(entry))  # type: ignore[return-value]
        except ValidationError as error:
            deepest = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
            place = ".".join(map(str, deepest["loc"]))
            raise ValueError(f"{place}: {deepest['msg']}, got {str(deepest['input'])[:80]}") from error

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def learned_tokens(self) -> int:
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


@cache
def _reader() -> TypeAdapter[Trajectory]:
    return TypeAdapter(Trajectory)


def parse_trajectories(
    entries: Any, *, vocabulary_size: int, max_length: int | None, sampled: bool = True
) -> list[Trajectory]:
    """Trajectories or their JSON. Raises one ValueError for all problems."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) == 0:
        raise ValueError(f"trajectories must be a non-empty list, got {_describe(entries)}")
    trajectories, found = [], []
    for number, entry in enumerate(entries):
        try:
            if isinstance(entry, Trajectory):
                trajectory = entry
            elif isinstance(entry, Mapping):
                trajectory = Trajectory.from_json(entry, sampled=sampled)
            else:
                raise ValueError(f"expected an object, got {_describe(entry)}")
        except ValueError as error:
            found.append(f"trajectory {number}: {error}")
            continue
        trajectories.append(trajectory)
        found += [
            f"trajectory {number}: {problem}"
            for problem in problems(trajectory, vocabulary_size=vocabulary_size, max_length=max_length)
        ]
    if not found and not any(trajectory.learned_tokens for trajectory in trajectories):
        found.append(f"none of {len(trajectories)} trajectories has a token whose loss_mask is true")
    if found:
        rest = len(found) - MAX_NAMED
        raise ValueError("; ".join(found[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else ""))
    return trajectories


def _describe(value: Any) -> str:
    return "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:40]!r}"


def problems(trajectory: Trajectory, *, vocabulary_size: int, max_length: int | None) -> list[str]:
    found = []
    count = len(trajectory.token_ids)
    if not trajectory.prompt_token_ids:
        found.append("prompt_token_ids must not be empty")
    if count == 0:
        found.append("token_ids must not be empty")
    by_token = {name: getattr(trajectory, name) for name in ("logprobs", "loss_mask", "constrained")}
    if isinstance(trajectory.advantage, tuple):
        by_token["advantage"] = trajectory.advantage
    found += [
        f"{name} must have {count} entries, one for each token id, got {len(values)}"
        for name, values in by_token.items()
        if values is not None and len(values) != count
    ]
    mask = trajectory.loss_mask
    learned = trajectory.logprobs
    if mask is not None and len(mask) == count:
        learned = tuple(compress(learned, mask))
    if not all(math.isfinite(value) for value in learned):
        found.append("logprobs must be finite numbers, got NaN or infinity")
    elif any(value > 1e-3 for value in learned):  # allows rounding
        found.append(f"logprobs must not be above 0, got {max(learned)}")
    advantages = trajectory.advantage if isinstance(trajectory.advantage, tuple) else (trajectory.advantage,)
    if wrong := [value for value in advantages if not math.isfinite(value)]:
        found.append(f"advantage must be a finite number, got {wrong[0]}")
    outside = [t for t in trajectory.prompt_token_ids + trajectory.token_ids if not 0 <= t < vocabulary_size]
    if outside:
        found.append(f"token ids must lie in [0, {vocabulary_size}), got {outside[0]}")
    if max_length is not None and len(trajectory) > max_length:
        found.append(f"prompt and completion must have at most {max_length} tokens, got {len(trajectory)}")
    for span in trajectory.weight_versions:
        if not 0 <= span.start <= span.end <= count:
            found.append(f"a version span must lie in [0, {count}], got [{span.start}, {span.end}]")
        if not 0 <= span.version < 1 << 63:
            found.append(f"a version must be 0 or more, and less than 2 ** 63, got {span.version}")
    routed = trajectory.routed_experts
    if routed is not None and len(routed.ids) != (len(trajectory) - 1) * routed.position_bytes:
        found.append(
            f"routed_experts must have {len(trajectory) - 1} * {routed.position_bytes} bytes of ids, for "
            f"each position of prompt and completion but the last one, got {len(routed.ids)}"
        )
    return found
