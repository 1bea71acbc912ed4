"""Counts the ledger's events for Prometheus: rounds by outcome and duration, what they waited for, fences."""

import re
from collections.abc import Callable, Iterable, Sequence

from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import Event
from deployments.serve.instruments import FENCES, ROUND, ROUND_GAP, ROUND_PART, Record, record

_ACTION = re.compile(r"([a-z_]+): ")  # what a replica did not do


class EventCounts:
    """Args: `history` is the rounds that ended, oldest first."""

    def __init__(self, history: Callable[[], Sequence[RoundReport]], record: Record = record) -> None:
        self._history = history
        self._record = record

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.name == "fence":
                self._record(FENCES, reason=kind_of(str(event.fields["reason"])))
            elif event.name == "round" and event.fields["phase"] in ("committed", "aborted"):
                self._ended(event.fields["round_id"])

    def _ended(self, round_id: object) -> None:
        report = next((each for each in reversed(self._history()) if each.round_id == round_id), None)
        if report is None:  # so many have ended since that it is forgotten
            return
        self._record(ROUND, report.duration_s, outcome=report.phase)
        if report.phase != "committed":
            return
        for part, spent_s in report.parts.items():
            self._record(ROUND_PART, spent_s, part=part)
        for timings in report.replicas.values():
            self._record(ROUND_GAP, timings.gap_s)


def kind_of(reason: str) -> str:
    """A few kinds for the reasons of fences, which are sentences."""
    if found := _ACTION.match(reason):
        return found[1]
    return "deadline" if reason.startswith("missed the deadline") else "other"
