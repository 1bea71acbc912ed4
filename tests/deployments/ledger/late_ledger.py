"""A ledger that answers polls before it has looked at what follows from them."""

from deployments.ledger.ledger import Ledger
from deployments.protocol.poll import Directive, Report


class LateLedger(Ledger):
    """Every other time something follows from a report, it does so after a later one, or with a tick."""

    late = False

    def poll(self, report: Report, now: float) -> Directive:
        if self.on_report(report, now):
            self.late = not self.late
            if not self.late:
                self.advance(now)
        return self.directive(report)
