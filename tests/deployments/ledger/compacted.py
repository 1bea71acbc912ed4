"""What the journal keeps of decisions."""

from collections.abc import Iterable

from deployments.ledger.decisions import Decision, Lasting


def compact(decisions: Iterable[Decision]) -> list[Decision]:
    """The shortest list, in order, that recovers the same ledger."""
    lasting, kept = Lasting(), {}
    for number, decision in enumerate(decisions):
        kept[number] = decision
        for superseded in lasting.add(number, decision):
            del kept[superseded]
    return list(kept.values())
