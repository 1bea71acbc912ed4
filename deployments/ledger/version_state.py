"""Which version the fleet is at, the round in flight, and the rounds that ended."""

from collections import OrderedDict, deque

from deployments.errors import Conflict, SlipstreamError
from deployments.ledger.decisions import KEPT_ROUNDS, Aborted, Ended, Finished, Labelled, Opened, Stored
from deployments.ledger.fleet import Fleet
from deployments.ledger.round import Round, RoundPhase
from deployments.protocol import RoundReport


class RoundBook:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.committed_version = 0
        self.label: str | None = None
        self.persist = False  # replicas keep the committed version until one has written it to the store
        self.stored: Stored | None = None  # the newest version on disk
        self.current: Round | None = None
        self.history: deque[RoundReport] = deque(maxlen=KEPT_ROUNDS)
        self.last_round_id = 0
        self._errors: OrderedDict[int, SlipstreamError] = OrderedDict()  # of aborted rounds, by id

    @property
    def unstored(self) -> int | None:
        """The committed version, if a replica has to write it to the store and none has."""
        stored = 0 if self.stored is None else self.stored.version
        return self.committed_version if self.persist and stored < self.committed_version else None

    def new_round_id(self) -> int:
        self.last_round_id += 1
        self._fleet.decisions.append(Opened(round_id=self.last_round_id))
        return self.last_round_id

    def enter(self, current: Round, phase: RoundPhase, now: float) -> None:
        current.phase = phase
        self._fleet.events.record(
            "round", now, round_id=current.round_id, version=current.version, phase=phase.value
        )

    def undecided(self, round_id: int) -> Round:
        """The round in flight, if it has this id. Raises what ended it, or Conflict."""
        current = self.current
        if current is not None and current.round_id == round_id and not current.decided:
            return current
        if round_id in self._errors:
            raise self._errors[round_id]
        state = "no round is open" if current is None else f"round {current.round_id} is {current.phase}"
        raise Conflict(
            f"round {round_id} is not open: {state}; the fleet is at version {self.committed_version}",
            {"round_id": round_id, "committed_version": self.committed_version},
        )

    def relabel(self, label: str, now: float) -> None:
        self.label = label
        self._fleet.decisions.append(Labelled(version=self.committed_version, label=label))
        self._fleet.events.record("label", now, version=self.committed_version, label=label)

    def finish(self, current: Round, now: float) -> None:
        self._fleet.decisions.append(Finished(round_id=current.round_id))
        report = self._end(current, RoundPhase.COMMITTED, "", now)
        if current.close is not None:
            current.close.finish(result=report)

    def abort(self, current: Round, error: SlipstreamError, now: float) -> None:
        self._fleet.decisions.append(Aborted(round_id=current.round_id, reason=error.message))
        self._errors[current.round_id] = error
        while len(self._errors) > KEPT_ROUNDS:
            self._errors.popitem(last=False)
        self._end(current, RoundPhase.ABORTED, error.message, now)
        for task in [current.close, *self._fleet.tasks]:
            if task is not None and (task is current.close or task.round_id == current.round_id):
                task.finish(error=error)

    def _end(self, current: Round, phase: RoundPhase, reason: str, now: float) -> RoundReport:
        self.enter(current, phase, now)
        report = current.report(phase, reason, now)
        self.history.append(report)
        self._fleet.decisions.append(Ended(report=report))
        self.current = None
        return report
