"""Which version the fleet is at, the round in flight, and the rounds that ended."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace

from deployments.ledger.decisions import (
    KEPT_ROUNDS,
    Aborted,
    Committed,
    DecisionLog,
    Ended,
    EventLog,
    Finished,
    Founded,
    Labelled,
    Opened,
    Stored,
)
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import PendingCall
from deployments.ledger.rounds.round import Round, RoundPhase, require_label
from deployments.protocol.errors import Conflict, RoundAborted, SlipstreamError, TransferAborted
from deployments.protocol.publishing import RoundReport

# Rounds that ended, for `/fleet/rounds` and for a publisher that asks again; bounded.
#
# The newest rounds are kept whole. Of older ones in a large fleet the timings of each replica are dropped:
# two hundred rounds of a thousand replicas would be 20 MB of JSON.

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


class VersionState:
    """The committed version, the newest stored one, and the rounds. Only its methods change them."""

    def __init__(self, decisions: DecisionLog, events: EventLog, dispatch: Dispatch) -> None:
        self._decisions = decisions
        self._events = events
        self._dispatch = dispatch
        self._founded: Founded | None = None
        self._committed_version = 0
        self._label: str | None = None
        self._persist = False
        self._stored: Stored | None = None
        self._current: Round | None = None
        self._idle_since: float | None = None
        self._ended = EndedRounds()
        self._last_round_id = 0

    @property
    def committed_version(self) -> int:
        return self._committed_version

    @property
    def fleet_id(self) -> str:
        return "" if self._founded is None else self._founded.fleet_id

    def digest_of(self, version: int) -> str | None:
        """The digest with which a version was committed, where known."""
        return self._ended.digest_of(version)

    @property
    def label(self) -> str | None:
        return self._label

    @property
    def stored(self) -> Stored | None:
        """The newest version on disk."""
        return self._stored

    @property
    def stored_version(self) -> int:
        """The number of the newest version on disk; 0, the checkpoint of the start, needs no store."""
        return 0 if self._stored is None else self._stored.version

    @property
    def unstored(self) -> int | None:
        """The committed version, if a replica has to write it to the store and none has."""
        pending = self._persist and self.stored_version < self._committed_version
        return self._committed_version if pending else None

    @property
    def current(self) -> Round | None:
        """The round in flight."""
        return self._current

    def idle_s(self, now: float) -> float:
        """How long ago the last round ended; infinite if there was none in this process."""
        return math.inf if self._idle_since is None else now - self._idle_since

    @property
    def current_id(self) -> int | None:
        """The id of the round in flight."""
        return None if self._current is None else self._current.round_id

    def history(self) -> list[RoundReport]:
        """Rounds that ended, oldest first; bounded."""
        return self._ended.all()

    def rounds_ended(self) -> dict[str, int]:
        """How many rounds of this fleet were committed and aborted; only ever more, also after a restart.

        Nothing is counted: a round's id is never used twice, and each commit makes the next version.
        """
        undecided = self._current is not None and not self._current.decided
        aborted = self._last_round_id - self._committed_version - undecided
        return {"committed": self._committed_version, "aborted": aborted}

    def undecided(self, round_id: int) -> Round:
        """The round in flight, if it has this id and no decision yet.

        Raises:
            SlipstreamError: what aborted this round.
            Conflict: it is not in flight, or decided.
        """
        current = self._current
        if current is not None and current.round_id == round_id and not current.decided:
            return current
        self._ended.raise_error(round_id)
        state = "no round is open" if current is None else f"round {current.round_id} is {current.phase}"
        raise Conflict(
            f"round {round_id} is not open: {state}; the fleet is at version {self._committed_version}",
            {"round_id": round_id, "committed_version": self._committed_version},
        )

    def closed(self, round_id: int, label: str | None) -> PendingCall | None:
        """How a round ends that its publisher has closed, or a predecessor has ended; None: it has not been.

        For a close that comes again: the controller restarted before its publisher had the answer.

        Raises:
            Conflict: it was closed with another label, so by another publisher. All who call over HTTP share
                one lease, and a call that comes late is only told apart by its label.
        """
        current = self._current
        if current is not None and current.round_id == round_id:
            if current.close is not None or current.decided:
                require_label(round_id, current.label, label)
            if current.close is None and current.decided:  # decided by a predecessor
                current.close = PendingCall(name="close_round", round_id=round_id)
            return current.close
        return self._ended.closed(round_id, label)

    # -- a round's life -----------------------------------------------------------------------

    def new_round_id(self) -> int:
        self._last_round_id += 1
        self._decisions.append(Opened(round_id=self._last_round_id))
        return self._last_round_id

    def open(self, opened: Round, now: float) -> None:
        self._current = opened
        self.enter(RoundPhase.OPEN, now)

    def enter(self, phase: RoundPhase, now: float, reason: str = "") -> None:
        """The round in flight is in its next phase."""
        current = self._in_flight()
        current.phase = phase
        self._events.record(
            "round",
            now,
            round_id=current.round_id,
            version=current.version,
            phase=phase.value,
            replicas=[member.replica_id for member in current.remaining()],
            age_s=round(now - current.opened_at, 3),
            reason=reason,
        )

    def commit(self, decided: Round, now: float) -> None:
        """The round's version is the fleet's from here on; also a round that a restart resumes."""
        self._current = decided
        self._committed_version, self._label = decided.version, decided.label
        self._persist = decided.persist
        self.enter(RoundPhase.COMMITTING, now)

    def finish(self, now: float) -> None:
        current = self._in_flight()
        self._decisions.append(Finished(round_id=current.round_id))
        report = self._end(current, RoundPhase.COMMITTED, "", now)
        if current.close is not None:
            current.close.finish(result=report)

    def abort(self, error: SlipstreamError, now: float) -> None:
        """End the round in flight without a commit; calls that wait for it fail with the error."""
        current = self._in_flight()
        self._decisions.append(Aborted(round_id=current.round_id, reason=error.message))
        self._ended.failed(current.round_id, error)
        self._end(current, RoundPhase.ABORTED, error.message, now)
        for call in [current.close, *self._dispatch.pending]:
            if call is not None and (call is current.close or call.round_id == current.round_id):
                call.finish(error=error)

    def require_no_round(self, action: str) -> None:
        """Raises Conflict while a round is in flight."""
        current = self._current
        if current is not None:
            raise Conflict(
                f"cannot {action} while round {current.round_id} is {current.phase}",
                {"round_id": current.round_id},
            )

    # -- label and store ----------------------------------------------------------------------

    def relabel(self, label: str, now: float) -> None:
        """Give the committed version another label."""
        self._label = label
        self._decisions.append(Labelled(version=self._committed_version, label=label))
        self._events.record("label", now, version=self._committed_version, label=label)

    def set_stored(self, stored: Stored, now: float) -> None:
        """A version is complete on disk; an older one than the newest changes nothing."""
        if self._stored is None or stored.version >= self._stored.version:
            self._stored = stored
            self._decisions.append(stored)
        self._events.record("stored", now, version=stored.version, path=stored.path, label=stored.label)

    # -- recovery -----------------------------------------------------------------------------

    def found(self, fleet_id: str) -> None:
        """Give the fleet its id, unless it has one."""
        if self._founded is None:
            self._founded = Founded(fleet_id=fleet_id)
            self._decisions.append(self._founded)

    def serve(self, model: str, *, in_use: bool) -> str | None:
        """The fleet serves this model. Returns the one whose versions it has (`in_use`), if it is another."""
        assert self._founded is not None
        if in_use and self._founded.model not in (None, model):
            return self._founded.model
        if self._founded.model != model:
            self._founded = replace(self._founded, model=model)
            self._decisions.append(self._founded)
        return None

    def recover_founded(self, decision: Founded) -> None:
        self._founded = decision

    def recover_round_id(self, round_id: int) -> None:
        self._last_round_id = round_id

    def recover_committed(self, decision: Committed) -> None:
        self._committed_version, self._label = decision.version, decision.label
        self._persist = decision.persist

    def recover_label(self, decision: Labelled) -> None:
        if decision.version == self._committed_version:
            self._label = decision.label

    def recover_stored(self, decision: Stored) -> None:
        self._stored = decision

    def recover_report(self, report: RoundReport) -> None:
        self._ended.append(report)

    def recover_end(self, phase: RoundPhase, reason: str, epoch: int) -> None:
        """The last round has ended, and its predecessor may not have written its entry in the history."""
        if self._ended.has(self._last_round_id):
            return
        committed = phase is RoundPhase.COMMITTED
        report = RoundReport(
            round_id=self._last_round_id,
            version=self._committed_version + (0 if committed else 1),
            label=self._label if committed else None,
            epoch=epoch,
            phase=phase.value,
            reason=reason,
            duration_s=0.0,
        )
        self._ended.append(report)
        self._decisions.append(Ended(report=report))

    def _in_flight(self) -> Round:
        assert self._current is not None, "no round is in flight"
        return self._current

    def _end(self, current: Round, phase: RoundPhase, reason: str, now: float) -> RoundReport:
        self.enter(phase, now, reason)
        report = current.report(phase, reason, now)
        self._ended.append(report)
        self._decisions.append(Ended(report=report))
        self._current, self._idle_since = None, now
        return report
