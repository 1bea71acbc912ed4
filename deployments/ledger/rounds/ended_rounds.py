"""Rounds that ended, for `/fleet/rounds` and for a publisher that asks again; bounded.

The newest rounds are kept whole. Of older ones in a large fleet the timings of each replica are dropped: two
hundred rounds of a thousand replicas would be 20 MB of JSON.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace

from deployments.errors import RoundAborted, SlipstreamError, TransferAborted
from deployments.ledger.decisions import KEPT_ROUNDS
from deployments.ledger.members import PendingCall
from deployments.ledger.rounds.round import RoundPhase, require_label
from deployments.protocol.publishing import RoundReport

CONTROLLER_RESTARTED = "the controller restarted"  # why it aborts the round that its predecessor had open
KEPT_TIMINGS = 2000  # of replicas, over all rounds; those of the newest round are kept however many they are


class EndedRounds:
    """Reports of rounds, oldest first, and the errors of those that were aborted."""

    def __init__(self) -> None:
        self._reports: deque[RoundReport] = deque(maxlen=KEPT_ROUNDS)
        self._errors: OrderedDict[int, SlipstreamError] = OrderedDict()  # of this process, by round

    def append(self, report: RoundReport) -> None:
        """The newest."""
        self._reports.append(report)
        kept = 0
        for index in range(len(self._reports) - 1, -1, -1):
            timings = self._reports[index].replicas
            kept += len(timings)
            if timings and kept > KEPT_TIMINGS and index < len(self._reports) - 1:
                self._reports[index] = replace(self._reports[index], replicas={})

    def newest_first(self) -> Iterator[RoundReport]:
        """From the newest to the oldest."""
        return reversed(self._reports)

    def all(self) -> list[RoundReport]:
        """Oldest first."""
        return list(self._reports)

    def failed(self, round_id: int, error: SlipstreamError) -> None:
        """This round was aborted with an error, which its publisher is told."""
        self._errors[round_id] = error
        while len(self._errors) > KEPT_ROUNDS:
            self._errors.popitem(last=False)

    def raise_error(self, round_id: int) -> None:
        """Raises SlipstreamError, what aborted this round, if it was."""
        if round_id in self._errors:
            raise self._errors[round_id]

    def has(self, round_id: int) -> bool:
        return self._find(round_id) is not None

    def digest_of(self, version: int) -> str | None:
        """The digest with which a version was committed, where known."""
        reports = (each for each in self.newest_first() if each.version == version)
        return next((each.digest for each in reports if each.phase == RoundPhase.COMMITTED), None)

    def closed(self, round_id: int, label: str | None) -> PendingCall | None:
        """How the round ended; None: it is not known. Raises Conflict if it has another label."""
        report = self._find(round_id)
        if report is None:
            return None
        call = PendingCall(name="close_round", round_id=round_id)
        if report.phase == RoundPhase.COMMITTED:
            require_label(round_id, report.label, label)
            call.finish(result=report)
        else:
            call.finish(error=self._errors.get(round_id, _aborted(report)))
        return call

    def _find(self, round_id: int) -> RoundReport | None:
        return next((each for each in self.newest_first() if each.round_id == round_id), None)


def _aborted(report: RoundReport) -> SlipstreamError:
    """What ended a round of a predecessor, for its publisher."""
    message = f"round {report.round_id} aborted: {report.reason}"
    if report.reason == CONTROLLER_RESTARTED:
        return TransferAborted(
            f"{message}; connect again, and send the round again",
            {"round_id": report.round_id, "send_again": True},
        )
    return RoundAborted(message, {"round_id": report.round_id})
