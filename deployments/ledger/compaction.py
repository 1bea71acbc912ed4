"""Which decisions of a journal are still needed: what a later one on the same subject has not superseded."""

from collections.abc import Iterable

from deployments.ledger.decisions import (
    KEPT_FENCES,
    KEPT_ROUNDS,
    Admitted,
    Decision,
    Ended,
    Fenced,
    Promised,
    PromiseEnded,
)


def compact(decisions: Iterable[Decision]) -> list[Decision]:
    """The shortest list, in order, that recovers the same ledger."""
    decided = list(decisions)
    last = {_subject(decision): index for index, decision in enumerate(decided)}
    lasting = [decided[index] for index in sorted(last.values())]
    fences = [each for each in lasting if isinstance(each, Fenced)]
    rounds = [each for each in lasting if isinstance(each, Ended)]
    delivered = {each.incarnation for each in fences if each.told}
    kept = [each for each in lasting if isinstance(each, PromiseEnded)]
    forgotten = set(map(id, [*fences[:-KEPT_FENCES], *rounds[:-KEPT_ROUNDS], *kept]))
    return [each for each in lasting if id(each) not in forgotten and not _admits_one_of(each, delivered)]


def _subject(decision: Decision) -> str:
    """A later decision on the same subject supersedes an earlier one."""
    match decision:
        case Admitted():
            return f"admitted {decision.member.incarnation}"
        case Promised() | PromiseEnded():
            return f"promised {decision.incarnation}"
        case Fenced():
            return f"fenced {decision.incarnation}"
        case Ended():
            return f"ended {decision.report.round_id}"
        case _:
            return decision.kind


def _admits_one_of(decision: Decision, incarnations: set[str]) -> bool:
    return isinstance(decision, Admitted) and decision.member.incarnation in incarnations
