"""Trajectories: sampled answers with their advantages, validated before a step uses them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
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
    """One sampled answer and its advantage within its group.

    An answer of several turns is one trajectory: what tools and users said in between is part of `token_ids`,
    and masked.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    # Of token_ids, as the rollout engine computed them when it sampled; any number where the mask is false.
    logprobs: tuple[float, ...]
    advantage: float | tuple[float, ...]  # of the answer, or of each of token_ids
    weight_versions: tuple[VersionSpan, ...] = ()
    loss_mask: tuple[bool, ...] | None = None  # of token_ids: whether it is learned from; None: all are
    # Of token_ids: whether a grammar (a tool_choice, a regular expression) left fewer tokens to choose from.
    # vLLM reports the log-probability among those, which is not the policy's. None: none was.
    constrained: tuple[bool, ...] | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, sampled: bool = True) -> Self:
        """Read the JSON form: the same names, lists instead of tuples.

        Args:
            sampled: false for an answer that is imitated: `logprobs` and `advantage` may be missing.

        Raises:
            ValueError: a field is missing or of the wrong type; the message names it.
        """
        try:
            if not sampled:
                entry = {"logprobs": (0.0,) * len(entry["token_ids"]), "advantage": 0.0} | dict(entry)
            return cls(
                prompt_token_ids=_integers(entry["prompt_token_ids"], "prompt_token_ids"),
                token_ids=_integers(entry["token_ids"], "token_ids"),
                logprobs=_numbers(entry["logprobs"], "logprobs"),
                advantage=_advantage(entry["advantage"]),
                weight_versions=tuple(_span(span) for span in entry.get("weight_versions", ())),
                loss_mask=_booleans(entry.get("loss_mask"), "loss_mask"),
                constrained=_booleans(entry.get("constrained"), "constrained"),
            )
        except KeyError as error:
            raise ValueError(
                f"a trajectory needs the field {error.args[0]!r}, got {sorted(entry)}"
            ) from error
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a trajectory has a field of the wrong type: {error}") from error

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def learned_tokens(self) -> int:
        """How many of its tokens are learned from."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


def _span(fields: Any) -> VersionSpan:
    span = VersionSpan(**fields)
    _integers((span.version, span.start, span.end), "weight_versions")
    return span


def _numbers(values: Iterable[Any], field: str) -> tuple[float, ...]:
    numbers = tuple(values)
    for value in numbers:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{field} must hold numbers, got {value!r}")
    return tuple(float(value) for value in numbers)


def _advantage(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _numbers(value, "advantage")
    (number,) = _numbers((value,), "advantage")
    return number


def _booleans(values: Any, field: str) -> tuple[bool, ...] | None:
    if values is None:
        return None
    booleans = tuple(values)
    for value in booleans:
        if not isinstance(value, bool) and value not in (0, 1):
            raise TypeError(f"{field} must hold booleans, got {value!r}")
    return tuple(bool(value) for value in booleans)


def _integers(values: Iterable[Any], field: str) -> tuple[int, ...]:
    integers = tuple(values)
    for value in integers:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{field} must hold integers, got {value!r}")
    return integers


def parse_trajectories(
    entries: Any, *, vocabulary_size: int, max_length: int, sampled: bool = True
) -> list[Trajectory]:
    """Read and check a whole batch; every problem is collected before one error is raised.

    Args:
        entries: trajectories, or their JSON form.
        sampled: as in `Trajectory.from_json`.

    Raises:
        ValueError: what was expected and what came, for the first problems, with trajectory numbers.
    """
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
    mask = trajectory.loss_mask
    if mask is not None and len(mask) != count:
        found.append(f"loss_mask must have {count} entries, one for each token id, got {len(mask)}")
        mask = None
    if trajectory.constrained is not None and len(trajectory.constrained) != count:
        found.append(
            f"constrained must have {count} entries, one for each token id, got {len(trajectory.constrained)}"
        )
    learned = trajectory.logprobs if mask is None else tuple(compress(trajectory.logprobs, mask))
    if not all(math.isfinite(value) for value in learned):
        found.append("logprobs must be finite numbers, got NaN or infinity")
    elif any(value > 1e-3 for value in learned):  # a little above 0 is rounding
        found.append(f"logprobs must not be above 0, got {max(learned)}")
    found += _problems_of_advantage(trajectory.advantage, count)
    outside = [t for t in trajectory.prompt_token_ids + trajectory.token_ids if not 0 <= t < vocabulary_size]
    if outside:
        found.append(f"token ids must lie in [0, {vocabulary_size}), got {outside[0]}")
    if len(trajectory) > max_length:
        found.append(f"prompt and answer must have at most {max_length} tokens, got {len(trajectory)}")
    for span in trajectory.weight_versions:
        if not 0 <= span.start <= span.end <= count:
            found.append(f"a version span must lie in [0, {count}], got [{span.start}, {span.end}]")
    return found


def _problems_of_advantage(advantage: float | tuple[float, ...], count: int) -> list[str]:
    values = (advantage,) if isinstance(advantage, float | int) else advantage
    if isinstance(advantage, tuple) and len(advantage) != count:
        return [
            f"advantage must be a number, or {count} of them, one for each token id, got {len(advantage)}"
        ]
    wrong = [value for value in values if not math.isfinite(value)]
    return [f"advantage must be a finite number, got {wrong[0]}"] if wrong else []
