"""Trajectories: sampled answers with their advantages, validated before a step uses them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

MAX_NAMED = 3  # problems that an error message names; it counts the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens [start, end) were sampled from this version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled answer and its advantage within its group."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of token_ids, as the rollout engine computed them when it sampled
    advantage: float
    weight_versions: tuple[VersionSpan, ...] = ()

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Read the JSON form: the same names, lists instead of tuples.

        Raises:
            ValueError: a field is missing or of the wrong type; the message names it.
        """
        try:
            return cls(
                prompt_token_ids=_integers(entry["prompt_token_ids"], "prompt_token_ids"),
                token_ids=_integers(entry["token_ids"], "token_ids"),
                logprobs=tuple(float(value) for value in entry["logprobs"]),
                advantage=float(entry["advantage"]),
                weight_versions=tuple(_span(span) for span in entry.get("weight_versions", ())),
            )
        except KeyError as error:
            raise ValueError(
                f"a trajectory needs the field {error.args[0]!r}, got {sorted(entry)}"
            ) from error
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a trajectory has a field of the wrong type: {error}") from error

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


def _span(fields: Any) -> VersionSpan:
    span = VersionSpan(**fields)
    _integers((span.version, span.start, span.end), "weight_versions")
    return span


def _integers(values: Iterable[Any], field: str) -> tuple[int, ...]:
    integers = tuple(values)
    for value in integers:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{field} must hold integers, got {value!r}")
    return integers


def parse_trajectories(entries: Any, *, vocabulary_size: int, max_length: int) -> list[Trajectory]:
    """Read and check a whole batch; every problem is collected before one error is raised.

    Raises:
        ValueError: what was expected and what came, for the first problems, with trajectory numbers.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) == 0:
        raise ValueError(f"trajectories must be a non-empty list, got {_describe(entries)}")
    trajectories, found = [], []
    for number, entry in enumerate(entries):
        try:
            if not isinstance(entry, Mapping):
                raise ValueError(f"expected an object, got {_describe(entry)}")
            trajectory = Trajectory.from_json(entry)
        except ValueError as error:
            found.append(f"trajectory {number}: {error}")
            continue
        trajectories.append(trajectory)
        found += [
            f"trajectory {number}: {problem}"
            for problem in problems(trajectory, vocabulary_size=vocabulary_size, max_length=max_length)
        ]
    if found:
        rest = len(found) - MAX_NAMED
        raise ValueError("; ".join(found[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else ""))
    return trajectories


def _describe(value: Any) -> str:
    return "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:40]!r}"


def problems(trajectory: Trajectory, *, vocabulary_size: int, max_length: int) -> list[str]:
    """The reasons why a trajectory cannot be used, one sentence each; empty if it is valid."""
    found = []
    count = len(trajectory.token_ids)
    if not trajectory.prompt_token_ids:
        found.append("prompt_token_ids must not be empty")
    if count == 0:
        found.append("token_ids must not be empty")
    if len(trajectory.logprobs) != count:
        found.append(
            f"logprobs must have {count} entries, one for each token id, got {len(trajectory.logprobs)}"
        )
    if not all(math.isfinite(value) for value in trajectory.logprobs):
        found.append("logprobs must be finite numbers, got NaN or infinity")
    elif any(value > 1e-3 for value in trajectory.logprobs):  # a little above 0 is rounding
        found.append(f"logprobs must not be above 0, got {max(trajectory.logprobs)}")
    if not math.isfinite(trajectory.advantage):
        found.append(f"advantage must be a finite number, got {trajectory.advantage}")
    outside = [t for t in trajectory.prompt_token_ids + trajectory.token_ids if not 0 <= t < vocabulary_size]
    if outside:
        found.append(f"token ids must lie in [0, {vocabulary_size}), got {outside[0]}")
    if len(trajectory) > max_length:
        found.append(f"prompt and answer must have at most {max_length} tokens, got {len(trajectory)}")
    for span in trajectory.weight_versions:
        if not 0 <= span.start <= span.end <= count:
            found.append(f"a version span must lie in [0, {count}], got [{span.start}, {span.end}]")
    return found
