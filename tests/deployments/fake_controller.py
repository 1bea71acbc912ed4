"""A controller handle without a fleet: it opens what a transport sends, commits it, and refuses what the
real controller refuses (a stale token, a call out of order).

Time is virtual: `takes_s` says how long a call takes, and waiting for its result moves the clock.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from ray.exceptions import ActorDiedError

from deployments.errors import (
    Conflict,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
    TransferAborted,
)
from deployments.protocol.publishing import Lease, RoundOptions, RoundReport
from deployments.protocol.status import (
    ConnectionStatus,
    FleetStatus,
    LeaseStatus,
    MemberStatus,
    RoundStatus,
    SizeStatus,
)
from deployments.weights.transports.shm import open_segment
from deployments.weights.wire.chunk_layout import parse, plan_chunks
from tests.deployments.fake_handle import Method

LEASE_S = 60.0
RESTART_S = 5.0


class FakeController:
    """Stands where a `UnaryHandle` does: `handle.method.remote(...).result()`, or awaited.

    Attributes for tests: `abort_next` is raised by the next close; `takes_s` has the duration of calls by
    method; `calls` has the methods in the order in which they began; `dies_in` names methods in whose next
    call the process dies, before or after it carried the call out; its successor answers `RESTART_S` later.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.takes_s: dict[str, float] = {}
        self.version = 0
        self.epoch = 1
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.stored_versions: dict[int, str] = {}
        self.problems: dict[int, str] = {}  # of versions that could not be stored
        self.kept_since: int | None = None  # of the next version
        self.abort_next: RoundAborted | None = None
        self.abort_reasons: list[str] = []
        self.dies_in: dict[str, Literal["before", "after"]] = {}
        self.member_states = ["serving"]
        self.up_at = 0.0  # when the successor answers
        self.options: RoundOptions | None = None  # of the last round
        self.connected_to: str | None = None  # the publisher's name
        self.init_info: dict[str, Any] = {}  # of the connection
        self.lease: Lease | None = None
        self.open_round_id: int | None = None
        self.round_phase = "open"  # of the round in flight
        self._connected_epoch = 0
        self._last_token = 0
        self._last_round_id = 0
        self._payloads = 0  # of the open round
        self._aborted: dict[int, SlipstreamError] = {}  # round id -> why
        self._committed: dict[int, RoundReport] = {}  # by round id
        self._lease_ends = 0.0
        self._scheduled: list[tuple[float, Callable[[], object]]] = []

    def __getattr__(self, name: str) -> "Method":
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def answer(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        fate = self.dies_in.pop(method, None)
        if fate == "before":
            self.restart()
            raise ActorDiedError
        result = getattr(self, f"on_{method}")(*args)
        if fate == "after":
            self.restart()
            raise ActorDiedError
        return result

    def restart(self) -> None:
        """A new process: it knows what was decided, and no lease and no connection."""
        if self.open_round_id is not None:
            self._aborted[self.open_round_id] = TransferAborted(
                f"round {self.open_round_id} aborted: the controller restarted",
                {"round_id": self.open_round_id, "send_again": True},
            )
        self.open_round_id, self.lease, self.connected_to = None, None, None
        self.up_at = self.now + RESTART_S

    # -- time ---------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Run `action` when the clock reaches `time`."""
        self._scheduled.append((time, action))

    def advance(self, to: float) -> None:
        while due := sorted((each for each in self._scheduled if each[0] <= to), key=lambda each: each[0]):
            self._scheduled.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = max(self.now, to)

    def holds(self, token: int) -> bool:
        return self.lease is not None and self.lease.token == token and self.now < self._lease_ends

    # -- the lease ----------------------------------------------------------------------------

    def on_acquire(self, publisher: str) -> Lease:
        held = self.lease
        if held is not None and held.publisher != publisher and self.holds(held.token):
            raise Conflict(f"{held.publisher!r} publishes")
        self._abort("its publisher took a new lease")
        self._last_token += 1
        self.lease = Lease(publisher=publisher, token=self._last_token, duration_s=LEASE_S)
        self._lease_ends = self.now + LEASE_S
        return self.lease

    def on_renew(self, token: int) -> Lease:
        if self.lease is None or not self.holds(token):
            raise StalePublisher(f"token {token} is stale: last token {self._last_token}")
        self._lease_ends = self.now + LEASE_S
        return self.lease

    def on_release(self, token: int) -> None:
        self.on_renew(token)
        self._abort("its publisher released the lease")
        self.lease = None

    # -- rounds -------------------------------------------------------------------------------

    def on_connect(self, token: int, init_info: Mapping[str, Any]) -> int:
        publisher = self.on_renew(token).publisher
        if self.open_round_id is not None:
            raise Conflict(f"cannot connect while round {self.open_round_id} is open")
        self.connected_to, self._connected_epoch = publisher, self.epoch
        self.init_info = dict(init_info)
        return 1

    def on_disconnect(self, token: int) -> dict[str, Any]:
        self.on_renew(token)
        if self.open_round_id is not None:
            raise Conflict(f"cannot disconnect while round {self.open_round_id} is open")
        self.connected_to = None
        return {}

    def on_open_round(self, token: int, options: RoundOptions) -> int:
        publisher = self.on_renew(token).publisher
        if self.open_round_id is not None:
            raise Conflict(f"round {self.open_round_id} is open: close or abort it before opening another")
        if self.connected_to != publisher:
            raise Conflict("connect before opening a round", {"connect_again": True})
        self.received = {}
        self._payloads = 0
        self.options = options
        self._last_round_id += 1
        self.open_round_id = self._last_round_id
        return self.open_round_id

    def on_send(self, token: int, round_id: int, payload: Mapping[str, Any]) -> None:
        self._require_open(token, round_id)
        self._payloads += 1
        self.receive(payload)

    def receive(self, payload: Mapping[str, Any]) -> None:
        """Open what the transport `shm` sends."""
        if "segment" not in payload:
            return  # not of the shm transport: nothing to read
        (chunk,) = plan_chunks(
            parse(payload["names"], payload["dtype_names"], payload["shapes"]), chunk_bytes=1 << 62
        )
        block = open_segment(payload["segment"], chunk.size_bytes)
        for entry in chunk.entries:
            data = block[entry.offset : entry.offset + entry.size_bytes].clone()
            self.received[entry.name] = data.view(entry.dtype).reshape(entry.shape)

    def on_close_round(self, token: int, round_id: int, label: str | None) -> RoundReport:
        if round_id in self._aborted:
            raise self._aborted[round_id]
        if round_id in self._committed:
            return self._committed[round_id]
        self._require_open(token, round_id)
        self.open_round_id = None
        error: SlipstreamError | None = self.abort_next
        if self._payloads == 0:
            error = InvalidRequest(f"round {round_id} has brought no payload")
        if error is not None:
            self.abort_next, self._aborted[round_id] = None, error
            raise error
        self.version += 1
        self._committed[round_id] = report = RoundReport(
            round_id=round_id,
            version=self.version,
            label=label,
            epoch=self.epoch,
            phase="committed",
            reason="",
            duration_s=0.0,
            kept_since=self.kept_since,
        )
        return report

    def on_abort_round(self, token: int, round_id: int, reason: str) -> None:
        self._require_open(token, round_id)
        self._abort(reason)
        self.abort_reasons.append(reason)

    def _require_open(self, token: int, round_id: int) -> None:
        self.on_renew(token)
        if round_id in self._aborted:
            raise self._aborted[round_id]
        if round_id != self.open_round_id:
            raise Conflict(f"round {round_id} is not open")

    def _abort(self, reason: str) -> None:
        if self.open_round_id is not None:
            self._aborted[self.open_round_id] = RoundAborted(f"round aborted: {reason}")
        self.open_round_id = None

    # -- the store, and queries ---------------------------------------------------------------

    def on_stored(self, version: int, path: str, label: str | None) -> None:
        self.stored_versions[version] = path

    def on_not_stored(self, version: int, reason: str) -> None:
        self.problems[version] = reason

    def on_rollback_source(self, version: int) -> str:
        if version not in self.stored_versions:
            raise InvalidRequest(f"version {version} is not in the store")
        return self.stored_versions[version]

    def on_fleet(self) -> FleetStatus:
        connection = None
        if self.connected_to is not None:
            connection = ConnectionStatus(
                connection_id=1,
                publisher=self.connected_to,
                collective=False,
                epoch=self._connected_epoch,
                replicas=("r0",),
            )
        return FleetStatus(
            fleet_id="fleet",
            committed_version=self.version,
            label=None,
            stored_version=max(self.stored_versions, default=None),
            epoch=self.epoch,
            ready=True,
            min_replicas=1,
            size=SizeStatus(wanted=1, least=1, most=1, running=1, joining=0, leaving=0, problem=None),
            workers=1,
            members=tuple(
                member_status(state, self.version, f"r{number}")
                for number, state in enumerate(self.member_states)
            ),
            round=None if self.open_round_id is None else round_status(self.open_round_id, self.round_phase),
            lease=None
            if self.lease is None or not self.holds(self.lease.token)
            else LeaseStatus(publisher=self.lease.publisher, remaining_s=self._lease_ends - self.now),
            connection=connection,
            store_problem=None,
            condition=(),
        )


def round_status(round_id: int, phase: str) -> RoundStatus:
    return RoundStatus(round_id=round_id, version=1, label=None, phase=phase, age_s=0.0, participants=("r0",))


def member_status(state: str, version: int, replica_id: str = "r0") -> MemberStatus:
    return MemberStatus(
        replica_id=replica_id,
        incarnation=f"{replica_id}-1",
        state=state,
        admitted=state == "serving",
        version=version,
        world_size=1,
        silent_s=0.0,
        pending=(),
        reason="",
    )
