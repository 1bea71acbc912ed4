"""The ledger's events for Prometheus: rounds by outcome and duration, what they waited for, fences."""

import re
from collections.abc import Iterable, Sequence

from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import Event
from deployments.serve.instruments import FENCES, ROUND, ROUND_GAP, ROUND_PART, Record, record

_ACTION = re.compile(r"([a-z_]+): ")


def count(events: Iterable[Event], rounds: Sequence[RoundReport], record: Record = record) -> None:
    """`rounds`: those that ended, oldest first."""
    for event in events:
        if event.name == "fence":
            record(FENCES, reason=kind_of(str(event.fields["reason"])))
        elif event.name == "round" and event.fields["phase"] in ("committed", "aborted"):
            for report in reversed(rounds):
                if report.round_id == event.fields["round_id"]:
                    _count_round(report, record)


def _count_round(report: RoundReport, record: Record) -> None:
    record(ROUND, report.duration_s, outcome=report.phase)
    if report.phase == "committed":
        for part, spent_s in report.parts.items():
            record(ROUND_PART, spent_s, part=part)
        for timings in report.replicas.values():
            record(ROUND_GAP, timings.gap_s)


def kind_of(reason: str) -> str:
    if found := _ACTION.match(reason):
        return found[1]
    return "deadline" if reason.startswith("missed the deadline") else "other"
