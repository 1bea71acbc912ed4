"""What publishers ask of the ledger: the lease, the connection, and a round from its opening to its close."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from pydantic import JsonValue

from deployments.errors import RoundAborted
from deployments.ledger.adapters.transfer import AdapterTransfers
from deployments.ledger.connection import Connections
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.lease import Publishers
from deployments.ledger.members import PendingCall
from deployments.ledger.rounds.staging_phase import StagingPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.ledger.store_assignment import StoreAssignment
from deployments.protocol.adapters import ReceiveAdapter
from deployments.protocol.files import FilePart
from deployments.protocol.operations import Disconnect, Operation
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions


class PublisherCalls(ABC):
    """Base of the ledger, whose parts these are. Each call with a token raises StalePublisher for any but the
    current one."""

    _publishers: Publishers
    _versions: VersionState
    _connections: Connections
    _staging: StagingPhase
    _storing: StoreAssignment
    _transfers: AdapterTransfers
    _desired_state: DesiredState

    @abstractmethod
    def advance(self, now: float) -> None:
        """Run what became possible."""

    @abstractmethod
    def call(self, operation: Operation, now: float) -> PendingCall:
        """Carry an operation out on every serving replica."""

    def acquire(self, publisher: str, now: float) -> Lease:
        """Issue the lease; see `Publishers.acquire`."""
        lease = self._publishers.acquire(publisher, now)
        self.advance(now)
        return lease

    def join_lease(self, publisher: str, now: float, *, renew: bool) -> JoinedLease:
        """The lease of a publisher whose calls carry no token; see `Publishers.join_lease`."""
        joined = self._publishers.join_lease(publisher, now, renew=renew)
        self.advance(now)
        return joined

    def renew(self, token: int, now: float) -> Lease:
        """Raises StalePublisher for any token but the current one, as do all calls of a publisher below."""
        return self._publishers.renew(token, now)

    def release(self, token: int, now: float) -> None:
        """Give the lease back; an undecided round is aborted."""
        self._publishers.release(token, now)
        self.advance(now)

    def connect(self, token: int, init_info: Mapping[str, JsonValue], now: float) -> PendingCall:
        """Every member joins the publisher's transfer group; see `Connections.connect`."""
        publisher = self.renew(token, now).publisher
        self._versions.require_no_round("connect")
        call = self._connections.connect(publisher, init_info, now)
        self.advance(now)
        return call

    def disconnect(self, token: int, now: float) -> PendingCall:
        """Every serving replica closes its end of the connection."""
        self.renew(token, now)
        self._versions.require_no_round("disconnect")
        self._connections.drop()
        return self.call(Disconnect(), now)

    def open_round(self, token: int, options: RoundOptions, now: float) -> int:
        """The round's id; see `StagingPhase.open`. Raises Conflict while the weights sleep."""
        publisher = self.renew(token, now).publisher
        connection = None if options.file_bytes is not None else self._connections.of(publisher)
        self._desired_state.check_awake()
        round_id = self._staging.open(self._storing.permitted(options), connection, now)
        self.advance(now)
        return round_id

    def send(self, token: int, round_id: int, payload: JsonValue | FilePart, now: float) -> PendingCall:
        """Every participant receives one payload; see `StagingPhase.send`."""
        self.renew(token, now)
        call = self._staging.send(round_id, payload, now)
        self.advance(now)
        return call

    def send_adapter(self, token: int, load_id: str, payload: JsonValue, now: float) -> PendingCall:
        """Every member receives an adapter's files; see `AdapterTransfers.send`."""
        publisher = self.renew(token, now).publisher
        self._versions.require_no_round("send an adapter")
        call = self._transfers.send(publisher, ReceiveAdapter(load_id=load_id, payload=payload), now)
        self.advance(now)
        return call

    def close_round(self, token: int, round_id: int, label: str | None, now: float) -> PendingCall:
        """The call's result is a RoundReport. One that comes again is answered from the record."""
        call = self._versions.closed(round_id, label)
        if call is None:
            self.renew(token, now)
            call = self._staging.close(round_id, label, now)
        self.advance(now)
        return call

    def abort_round(self, token: int, round_id: int, reason: str, now: float) -> None:
        """Raises SlipstreamError if the round is not open, or is decided."""
        self.renew(token, now)
        current = self._versions.undecided(round_id)
        error = RoundAborted(f"round {round_id} aborted by its publisher: {reason}", {"round_id": round_id})
        self._staging.abort(current, error, now)
        self.advance(now)
