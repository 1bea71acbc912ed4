"""A rollout's turns as sequences that a trainer learns from.

    turn 0  prompt A  answer b ──► turn 1  prompt A b C  answer d     sequence A | b C d, with C masked
                              └──► turn 2  prompt A b E  answer f     sequence A | b E f, with b and E masked

One sequence for each turn that no other continues. A sampled token is learned from once: later sequences mask
it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainers.trajectory import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """A turn's tokens beyond its parent's, and `CapturedTurn`'s other fields."""

    parent: int
    prompt: "array[int]"
    sampled: "array[int]"
    logprobs: "array[float]"
    weight_versions: Sequence[Sequence[int]]
    adapter: str | None
    constrained: bool
    finish_reason: str | None
    sampling: Mapping[str, Any]
    images: Sequence[str] = ()  # digests, of the whole prompt
    routed_experts: RoutedExperts | None = None  # only positions that the parent's answer lacks


def sequences(turns: Sequence[TurnTokens]) -> list[dict[str, Any]]:
    """`trainers.trajectory.Trajectory` in JSON, without `advantage`, with digests of `images`, and with each
    turn's place in `token_ids`."""
    continued = {turn.parent for turn in turns}
    learned: set[int] = set()
    found = []
    for leaf in range(len(turns)):
        if leaf not in continued and (made := _sequence(turns, _path(turns, leaf), learned)) is not None:
            found.append(made)
    return found


def _path(turns: Sequence[TurnTokens], leaf: int) -> list[int]:
    path = [leaf]
    while turns[path[-1]].parent >= 0:
        path.append(turns[path[-1]].parent)
    return path[::-1]


def _versions(turn: TurnTokens) -> Sequence[Sequence[int]]:
    if turn.adapter is None:
        return turn.weight_versions
    return [(int(turn.adapter.rpartition("@")[2]), 0, len(turn.sampled))]


def _sequence(turns: Sequence[TurnTokens], path: Sequence[int], learned: set[int]) -> dict[str, Any] | None:
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    constrained: list[bool] = []
    spans: list[dict[str, int]] = []
    places: list[dict[str, Any]] = []
    for number in path:
        turn = turns[number]
        given = 0 if number == path[0] else len(turn.prompt)
        start = len(tokens) + given
        tokens += [*(turn.prompt if given else ()), *turn.sampled]
        logprobs += [*[0.0] * given, *turn.logprobs]
        mask += [False] * given + [number not in learned] * len(turn.sampled)
        constrained += [False] * given + [turn.constrained] * len(turn.sampled)
        spans += [{"version": v, "start": start + a, "end": start + b} for v, a, b in _versions(turn)]
        places.append(
            {
                "turn": number,
                "start": start,
                "end": len(tokens),
                "adapter": turn.adapter,
                "finish_reason": turn.finish_reason,
                "sampling": dict(turn.sampling),
            }
        )
    learned.update(path)
    if not any(mask):  # an answer without a token
        return None
    return {
        "prompt_token_ids": turns[path[0]].prompt.tolist(),
        "token_ids": tokens,
        "logprobs": logprobs,
        "loss_mask": mask,
        "constrained": constrained,
        "weight_versions": spans,
        "turns": places,
        **({"images": list(images)} if (images := turns[path[-1]].images) else {}),
    } | _routed([turns[number].routed_experts for number in path])


def _routed(parts: Sequence[RoutedExperts | None]) -> dict[str, RoutedExperts]:
    """Each position's experts when its next token was sampled."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return {}
    return {"routed_experts": replace(known[0], ids=b"".join(part.ids for part in known))}
