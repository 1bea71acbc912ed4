"""How often replicas are heard: in a large fleet less often, so that heartbeats alone do not fill a core.

A poll that waits is answered at once when there is something to say, so a longer wait delays nothing but the
discovery that a process is gone.
"""

from deployments.ledger.ledger import Ledger
from deployments.protocol.reports import Report

BUSY_POLL_S = 0.2  # a replica that carries out an instruction paces itself, and polls again soon
HEARD_PER_S = 200  # polls that wait and say nothing
OF_HEARTBEAT = 0.25  # the longest wait, of the time after which a silent replica is lost
LONGEST_S = 10.0  # and never longer: a replica gives up a poll after a time of its own


class Pace:
    """The waits of one controller.

    Args:
        poll_s: how long a poll without updates waits in a small fleet.
        silent_s: in a small fleet the process of a member that has not polled for this long is looked up;
            more than `poll_s`.
    """

    def __init__(self, ledger: Ledger, *, poll_s: float, silent_s: float) -> None:
        self._ledger = ledger
        self._poll_s = poll_s
        self._silent_s = silent_s

    def wait_s(self, report: Report) -> float:
        """How long this poll waits, unless there is something to say."""
        return BUSY_POLL_S if self._ledger.is_busy(report) else self._idle_s()

    def silent_s(self) -> float:
        """After how long without a poll a process is looked up."""
        return self._silent_s + self._idle_s() - self._poll_s

    def _idle_s(self) -> float:
        limit_s = min(LONGEST_S, OF_HEARTBEAT * self._ledger.heartbeat_timeout_s)
        return max(self._poll_s, min(self._ledger.size / HEARD_PER_S, limit_s))
