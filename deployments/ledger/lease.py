"""One publisher at a time: a lease with a fencing token, so that a publisher that was away too long
cannot write into its successor's round."""

from deployments.ledger.adapters.transfer import AdapterTransfers
from deployments.ledger.connection import Connections
from deployments.ledger.decisions import DecisionLog, EventLog, LeaseIssued
from deployments.ledger.rounds.staging_phase import StagingPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.protocol.errors import Conflict, RoundAborted, StalePublisher
from deployments.protocol.publishing import JoinedLease, Lease
from deployments.protocol.responses import LeaseStatus


class LeaseDesk:
    """Issues, renews and expires the lease."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last_token = 0
        self._expires = 0.0
        self._held: Lease | None = None

    @property
    def held(self) -> Lease | None:
        return self._held

    def restart_after(self, token: int) -> None:
        """Tokens of a restarted controller are above those of its predecessor."""
        self._last_token = token

    def acquire(self, publisher: str, now: float) -> Lease:
        """Raises Conflict while another publisher holds it."""
        if self._held is not None and self._held.publisher != publisher:
            remaining_s = round(self._expires - now, 1)
            raise Conflict(
                f"{self._held.publisher!r} publishes; its lease ends in {remaining_s} s unless it is renewed",
                {"holder": self._held.publisher, "remaining_s": remaining_s},
            )
        self._last_token += 1
        self._held = Lease(publisher=publisher, token=self._last_token, duration_s=self._lease_s)
        self._expires = now + self._lease_s
        return self._held

    def renew(self, token: int, now: float) -> Lease:
        """Every call of the holder renews. Raises StalePublisher for any token but the current one."""
        held = self._held
        if held is None or held.token != token:
            holder = None if held is None else held.publisher
            state = "nobody holds the lease" if held is None else f"{holder!r} holds the lease"
            raise StalePublisher(
                f"token {token} is stale: {state} (last token {self._last_token}); acquire a new one",
                {"token": token, "last_token": self._last_token, "holder": holder},
            )
        self._expires = now + self._lease_s
        return held

    def release(self) -> None:
        self._held = None

    def credit(self, stalled_s: float) -> None:
        """Nobody could renew for so long."""
        self._expires += stalled_s

    def remaining_s(self, now: float) -> float:
        return 0.0 if self._held is None else max(0.0, self._expires - now)

    def status(self, now: float) -> LeaseStatus | None:
        """None if nobody holds it."""
        if self._held is None:
            return None
        remaining_s = round(self.remaining_s(now), 3)
        return LeaseStatus(publisher=self._held.publisher, remaining_s=remaining_s)


class Publishers:
    """Whose turn it is to publish, and what the end of a turn means for its round and its connection."""

    def __init__(
        self,
        lease: LeaseDesk,
        versions: VersionState,
        staging: StagingPhase,
        connections: Connections,
        transfers: AdapterTransfers,
        decisions: DecisionLog,
        events: EventLog,
    ) -> None:
        self._lease = lease
        self._versions = versions
        self._staging = staging
        self._connections = connections
        self._transfers = transfers
        self._decisions = decisions
        self._events = events

    def acquire(self, publisher: str, now: float) -> Lease:
        """Issue the lease. For its holder too: the old token is stale then, and the open round aborted.

        Raises:
            Conflict: another publisher holds it.
        """
        self.expire(now)
        before = self._lease.held
        lease = self._lease.acquire(publisher, now)
        self._decisions.append(LeaseIssued(token=lease.token, publisher=publisher))
        self._events.record("lease", now, publisher=publisher, token=lease.token)
        if before is not None:
            self._abort_undecided(f"{publisher!r} took a new lease", now)
        return lease

    def join_lease(self, publisher: str, now: float, *, renew: bool) -> JoinedLease:
        """The lease of a publisher whose calls carry no token (vLLM's clients); issues the lease if needed.

        Args:
            renew: for a call that belongs to the open round. Any other may be another program's, and must
                not keep the round of one that is gone.

        Raises:
            Conflict: another publisher holds it.
        """
        self.expire(now)
        held = self._lease.held
        if held is None or held.publisher != publisher:
            held = self.acquire(publisher, now)
        elif renew:
            self._lease.renew(held.token, now)
        current, remaining_s = self._versions.current, self._lease.remaining_s(now)
        round_id = None if current is None else current.round_id
        return JoinedLease(lease=held, round_id=round_id, remaining_s=remaining_s)

    def renew(self, token: int, now: float) -> Lease:
        """Raises StalePublisher for any token but the current one."""
        self.expire(now)
        return self._lease.renew(token, now)

    def release(self, token: int, now: float) -> None:
        """Take the lease back; an undecided round is aborted. Raises StalePublisher."""
        self.renew(token, now)
        self._abort_undecided("its publisher released the lease", now)
        self._lease.release()

    def expire(self, now: float) -> None:
        """End an overdue lease. A closed round needs its publisher no more, and its end may take longer."""
        held = self._lease.held
        if held is None:
            return
        current = self._versions.current
        if current is not None and current.close is not None:
            self._lease.renew(held.token, now)
        elif self._lease.remaining_s(now) <= 0:
            self._lease.release()
            self._events.record("lease_expired", now, publisher=held.publisher, token=held.token)
            self._abort_undecided(f"the lease of {held.publisher!r} expired", now)

    def _abort_undecided(self, why: str, now: float) -> None:
        self._connections.give_up(now)
        self._transfers.give_up(now)
        current = self._versions.current
        if current is not None and not current.decided:
            error = RoundAborted(f"round {current.round_id} aborted: {why}", {"round_id": current.round_id})
            self._staging.abort(current, error, now)
