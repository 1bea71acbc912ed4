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
        state = self.state
        members = [
            (each.replica_id, each.state, each.engine_state, [it.instruction.seq for it in each.queue])
            for each in state.members.values()
        ]
        current = state.round
        phase = None if current is None else (current.round_id, current.phase)
        events = [each.event_id for each in self.events_since(0)][-1:]
        engine_state, adapters = state.engine_state, self.adapters()
        return members, state.epoch, state.committed_version, phase, events, engine_state, adapters
