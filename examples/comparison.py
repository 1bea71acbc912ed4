"""Continuations of a fleet's answers beside those of a fresh engine: tokens, and their log-probabilities.

How far log-probabilities differ, how soon after the switch, and whether a fresh engine differs from itself,
tells rounding from a fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.fresh_engine import ScoredTokens

# Asks a fresh engine to continue the requests of these numbers; so many of them share a batch.
Fresh = Callable[[Sequence[int], int], Sequence[ScoredTokens]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one answer differs from another; positions count from the answer's start.

    Attributes:
        drifts_at: the first token with another log-probability, up to and including `differs_at`.
        drifting: how many have another one.
        drift: the largest difference between two log-probabilities.
    """

    differs_at: int | None = None
    drifts_at: int | None = None
    drifting: int = 0
    drift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    """One request against a fresh engine that has all requests in one batch.

    Attributes:
        before: tokens from the old weights.
        after: tokens from the new ones.
        engine: where the two differ, the engine's answer against its own with the request alone in the batch.
    """

    before: int
    after: int
    fleet: Difference
    engine: Difference | None = None

    def sentence(self) -> str:
        """Whether the answer is a fresh engine's, and if not, what is known."""
        found, own = self.fleet, self.engine
        text = "yes" if found.differs_at is None else f"not from token {found.differs_at} on"
        if own is not None and own.differs_at is not None:
            text += f" (a fresh engine's own answer alone neither, from token {own.differs_at} on)"
        if found.drifting:
            text += f"; log-probabilities of {found.drifting} tokens, from token {found.drifts_at} on, "
            text += f"by up to {found.drift:.2g}"
        if own is not None and own.drifting:
            text += f" (a fresh engine's own, alone, by up to {own.drift:.2g})"
        return text


def compare(
    switches: Sequence[int], continued: Sequence[ScoredTokens], fresh: Fresh
) -> list[AnswerComparison]:
    """Each answer's tokens after the switch with those of a fresh engine.

    Args:
        switches: how many tokens of each answer are from the old weights.
    """
    together = fresh(range(len(continued)), len(continued))
    found = [_difference(*each) for each in zip(switches, continued, together, strict=True)]
    again = [index for index, difference in enumerate(found) if difference != Difference()]
    alone = dict(zip(again, fresh(again, 1) if again else (), strict=True))
    return [
        AnswerComparison(
            before=switches[index],
            after=len(continued[index].token_ids),
            fleet=difference,
            engine=_difference(switches[index], together[index], alone[index]) if index in alone else None,
        )
        for index, difference in enumerate(found)
    ]


def _difference(start: int, one: ScoredTokens, other: ScoredTokens) -> Difference:
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    differs = next((index for index, (mine, its) in pairs if mine != its), None)
    compared = None if differs is None else differs + 1
    scores = zip(one.logprobs[:compared], other.logprobs[:compared], strict=True)
    off = {index: abs(mine - its) for index, (mine, its) in enumerate(scores) if mine != its}
    return Difference(
        differs_at=None if differs is None else start + differs,
        drifts_at=start + min(off) if off else None,
        drifting=len(off),
        drift=max(off.values(), default=0.0),
    )
