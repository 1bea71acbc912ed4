"""An adapter's bytes on their way to the replicas, over its publisher's connection.

Nothing is decided here. A replica that received nothing loads the fleet's copy, as every replica does of an
adapter whose files a user has loaded.
"""

from functools import partial

from deployments.ledger.connection import Connection, Connections
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.members import PendingCall, classify, join_reasons
from deployments.ledger.membership import Membership
from deployments.protocol.adapters import ReceiveAdapter
from deployments.protocol.errors import Conflict


class AdapterTransfers:
    """Sends what a publisher sends to all members of its connection."""

    def __init__(self, membership: Membership, dispatch: Dispatch, connections: Connections) -> None:
        self._membership = membership
        self._dispatch = dispatch
        self._connections = connections
        self._current: tuple[Connection, PendingCall] | None = None

    def send(self, publisher: str, body: ReceiveAdapter, now: float) -> PendingCall:
        """Its error is a Conflict that names the replicas without it; a communicator is not used again then.

        Raises:
            Conflict: the publisher is not connected to exactly those who serve.
        """
        connection, members = self._connections.of(publisher), self._membership.for_round()
        self._connections.check(connection, members)
        assert connection is not None, "checked"
        self.give_up(now)
        on_complete = partial(self._received, connection)
        call = self._dispatch.send_each(body.name, dict.fromkeys(members, body), now, on_complete=on_complete)
        self._current = connection, call
        return call

    def check_peers(self, now: float) -> None:
        """Nobody waits in a communicator for a member that is gone."""
        if self._current is not None:
            connection, _ = self._current
            if connection.collective and any(each.out for each in connection.members):
                self.give_up(now)

    def give_up(self, now: float) -> None:
        """Cancel the transfer that goes on: its publisher is gone, or one of the members."""
        current, self._current = self._current, None
        if current is not None:
            self._connections.cancel(current[1], ReceiveAdapter, now)

    def _received(self, connection: Connection, call: PendingCall, now: float) -> None:
        if self._current is not None and self._current[1] is call:
            self._current = None
        verdict = classify(call)
        self._membership.fence_each(verdict.replica_failed, call.name, now)
        lacking = {**call.absent, **verdict.not_done}
        if not lacking:
            return
        missing = connection.missing(call)
        self._membership.count_failed_transfers(verdict, call.name, now, missing)
        if connection.collective and self._connections.current is connection:
            self._connections.drop()
        reason = f"replicas did not receive the adapter: {join_reasons(lacking)}"
        call.finish(error=Conflict(reason, {"connect_again": connection.collective, "replicas": lacking}))
