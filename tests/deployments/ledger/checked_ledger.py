"""A ledger that looks at all members after a report from which nothing was to follow, and finds nothing."""

from deployments.ledger.ledger import Ledger
from deployments.protocol.poll import Report


class CheckedLedger(Ledger):
    """Checks what `Admission.on_report` returns."""

    def on_report(self, report: Report, now: float) -> bool:
        self.advance(now)  # what time alone makes possible, which the next tick would find
        follows = super().on_report(report, now)
        if not follows:
            before = self._visible()
            self.advance(now)
            assert self._visible() == before, f"something followed from {report}"
        return follows

    def _visible(self) -> object:
        """What anybody outside can notice of its state, and everything that it is about to do."""
        members = [
            (each.replica_id, each.state, each.condition, [queued.instruction.seq for queued in each.queue])
            for each in self._membership.all()
        ]
        current = self._versions.current
        phase = None if current is None else (current.round_id, current.phase)
        events = [each.event_id for each in self.events_since(0)][-1:]
        condition, adapters = self._desired_state.names(), self.adapters.status()
        return members, self._membership.epoch, self.committed_version, phase, events, condition, adapters
