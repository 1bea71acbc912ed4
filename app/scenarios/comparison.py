"""Continuations of a fleet's answers beside those of a fresh engine: tokens, and their log-probabilities.

Engines round, and where two tokens are as likely as each other a rounding decides. Log-probabilities help to
tell it from a fault: how far, and how soon after the switch they differ, beside a fresh engine's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.scenarios.fresh_engine import ScoredTokens

# Asks a fresh engine to continue the requests of these numbers; so many of them share a batch.
Fresh = Callable[[Sequence[int], int], Sequence[ScoredTokens]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How the log-probabilities of two answers differ, up to and with the first token that is another one.

    Attributes:
        at: the first token whose log-probability is not the same, counted from the answer's start.
        tokens: how many have another one.
        first: by how much its log-probability differs.
        largest: by how much that of any token does.
    """

    at: int
    tokens: int
    first: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One request against a fresh engine that has all requests in one batch, in tokens.

    The engine answers each request whose tokens differ once more, alone. So it is known whether its own
    answers depend on the batch.

    Attributes:
        before: from the old weights.
        after: from the new ones.
        differs_at: the first token that the fresh engine would not have sampled.
        drift: of the tokens after the switch.
        alone_differs_at: the first token that the fresh engine samples otherwise where the request is alone.
        alone_drift: between these two answers of the fresh engine.
    """

    before: int
    after: int
    differs_at: int | None = None
    drift: Drift | None = None
    alone_differs_at: int | None = None
    alone_drift: Drift | None = None

    def sentence(self) -> str:
        """For people: whether the answer is a fresh engine's, and if not, what is known."""
        said = "yes" if self.differs_at is None else f"not from token {self.differs_at} on"
        if self.alone_differs_at is not None:
            said += f" (a fresh engine's own answer alone neither, from token {self.alone_differs_at} on)"
        if self.drift is not None:
            said += (
                f"; log-probabilities of {self.drift.tokens} tokens, from token {self.drift.at} on, "
                f"by up to {self.drift.largest:.2g}"
            )
        if self.alone_drift is not None:
            said += f" (a fresh engine's own, alone, by up to {self.alone_drift.largest:.2g})"
        return said


def compare(
    switches: Sequence[int], continued: Sequence[ScoredTokens], fresh: Fresh, *, drifting_alone: bool = False
) -> list[Comparison]:
    """Each answer's tokens after the switch with those of a fresh engine.

    Args:
        switches: how many tokens of each answer are from the old weights.
        continued: the tokens after them.
        drifting_alone: ask again alone as well where only log-probabilities differ.
    """
    together = fresh(range(len(continued)), len(continued))
    found = [_differences(*each) for each in zip(switches, continued, together, strict=True)]
    again = [
        index
        for index, (differs_at, drift) in enumerate(found)
        if differs_at is not None or (drifting_alone and drift is not None)
    ]
    alone: dict[int, tuple[int | None, Drift | None]] = {}
    if again:
        for index, answer in zip(again, fresh(again, 1), strict=True):
            alone[index] = _differences(switches[index], together[index], answer)
    made = []
    for index, (differs_at, drift) in enumerate(found):
        alone_differs_at, alone_drift = alone.get(index, (None, None))
        made.append(
            Comparison(
                before=switches[index],
                after=len(continued[index].token_ids),
                differs_at=differs_at,
                drift=drift,
                alone_differs_at=alone_differs_at,
                alone_drift=alone_drift,
            )
        )
    return made


def _differences(start: int, one: ScoredTokens, other: ScoredTokens) -> tuple[int | None, Drift | None]:
    """The first token that is another one, and how log-probabilities differ until then."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    differs = next((index for index, (mine, its) in pairs if mine != its), None)
    compared = None if differs is None else differs + 1
    scores = zip(one.logprobs[:compared], other.logprobs[:compared], strict=True)
    off = [abs(mine - its) for mine, its in scores]
    changed = [index for index, value in enumerate(off) if value]
    drift = None
    if changed:
        at = changed[0]
        drift = Drift(at=start + at, tokens=len(changed), first=off[at], largest=max(off))
    return (None if differs is None else start + differs), drift
