"""The controller's port with two replicas that do everything at once; refuses what the real one refuses."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import JsonValue
from ray.exceptions import ActorDiedError

from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.engine_state import (
    AbortRequests,
    IsPaused,
    IsSleeping,
    Operation,
    ResetPrefixCache,
    Sleep,
    WakeUp,
    WeightChecksums,
)
from deployments.protocol.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    RoundAborted,
    StalePublisher,
    TransferAborted,
)
from deployments.protocol.poll import FilePart
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport, json_only
from deployments.protocol.responses import Event, FleetStatus, Health, SizeStatus
from tests.app.http.fake_status import report, status

REPLICAS = ("replica-0", "replica-1")


class Handle:
    """A Serve handle of an object in this process: a call starts at once, and is awaited for its result."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> "_Method":
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._method(*args))


class FakeController:
    """One publisher at a time, one round at a time.

    Attributes:
        calls: the names of the methods that were called.
        fail_next: method name -> the error of its next call.
        dies_before, dies_after: methods in whose next call the process dies, before or after it carried the
            call out; its successor is there at once.
        delay_s: method name -> how long its calls take.
        sent, operations, options: what was received.
        sleepers: replicas a part of which still sleeps after a wake-up.
        busy: replicas whose prefix cache cannot be reset, because requests hold blocks.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.renewals = 0  # by calls without a token, when they come and when they end
        self.joined = 0
        self.fail_next: dict[str, Exception] = {}
        self.dies_before: set[str] = set()
        self.dies_after: set[str] = set()
        self.delay_s: dict[str, float] = {}
        self.sent: list[JsonValue | FilePart] = []
        self.stored: dict[int, str] = {}  # directories by version
        self.operations: list[Operation] = []
        self.options: list[RoundOptions] = []
        self.init_info: JsonValue = None
        self.version = 3
        self.label: str | None = None
        self.serving: Sequence[str] = REPLICAS
        self.sleepers: set[str] = set()
        self.busy: set[str] = set()
        self.checksums: dict[str, list[dict[str, str]]] = {name: [{"w": "aa"}] for name in REPLICAS}
        self.lease: Lease | None = None
        self.round_id: int | None = None
        self.reports: list[RoundReport] = []
        self.recorded: list[Event] = []
        self.lease_s = 60.0
        self._last_token = 0
        self._last_round = 0

    # -- publisher ----------------------------------------------------------------------------

    async def acquire(self, publisher: str) -> Lease:
        await self._enter("acquire")
        return self._acquire(publisher)

    async def join_lease(self, publisher: str, renew: bool) -> JoinedLease:
        await self._enter("join_lease")
        self.renewals += renew
        if self.lease is None or self.lease.publisher != publisher:
            self._acquire(publisher)
        assert self.lease is not None
        self.joined += 1
        return JoinedLease(lease=self.lease, round_id=self.round_id, remaining_s=self.lease.duration_s)

    async def leave_lease(self, publisher: str, renew: bool) -> None:
        await self._enter("leave_lease")
        self.renewals += renew
        if self.lease is not None and self.lease.publisher == publisher:
            self.joined -= 1
            if self.round_id is None and not self.joined:
                self.lease = None

    async def renew(self, token: int) -> Lease:
        await self._enter("renew")
        return self._holder(token)

    async def release(self, token: int) -> None:
        await self._enter("release")
        self._holder(token)
        self.lease, self.round_id = None, None

    async def connect(self, token: int, init_info: Mapping[str, JsonValue]) -> int:
        await self._enter("connect")
        self._holder(token)
        self._no_round("connect")
        self.init_info = json_only(init_info, "init_info")
        self._leave("connect")
        return 1

    async def disconnect(self, token: int) -> dict[str, JsonValue]:
        await self._enter("disconnect")
        self._holder(token)
        self._no_round("disconnect")
        self.init_info = None
        return dict.fromkeys(self.serving)

    async def open_round(self, token: int, options: RoundOptions) -> int:
        await self._enter("open_round")
        self._holder(token)
        self._no_round("open a round")
        self._last_round += 1
        self.round_id = self._last_round
        self.options.append(options)
        self._leave("open_round")
        return self._last_round

    async def send(self, token: int, round_id: int, payload: JsonValue | FilePart) -> None:
        await self._enter("send")
        self._holder(token)
        self._undecided(round_id)
        self.sent.append(payload if isinstance(payload, FilePart) else json_only(payload, "payload"))
        self._leave("send")

    async def abort_round(self, token: int, round_id: int, reason: str) -> None:
        await self._enter("abort_round")
        self._holder(token)
        self._undecided(round_id)
        aborted = report(round_id, self.version + 1, phase="aborted")
        self.reports.append(replace(aborted, reason=reason))
        self.round_id = None

    async def close_round(self, token: int, round_id: int, label: str | None) -> RoundReport:
        try:
            await self._enter("close_round")
        except RoundAborted:
            self.round_id = None  # an aborted round is over
            raise
        for each in self.reports:
            if each.round_id == round_id and each.phase == "committed":
                return each
            if each.round_id == round_id:
                raise TransferAborted(each.reason, {"send_again": True})
        self._holder(token)
        self._undecided(round_id)
        self.round_id, self.label, self.version = None, label, self.version + 1
        self.reports.append(report(round_id, self.version, label))
        self._leave("close_round")
        return self.reports[-1]

    # -- the fleet ----------------------------------------------------------------------------

    async def call(self, operation: Operation) -> dict[str, JsonValue]:
        await self._enter("call")
        if isinstance(operation, Sleep) and operation.level:
            self._no_round("sleep")
        self.operations.append(operation)
        return {replica_id: self._answer(operation, replica_id) for replica_id in self.serving}

    async def rollback_source(self, version: int) -> str:
        await self._enter("rollback_source")
        if version not in self.stored:
            raise InvalidRequest(f"version: expected one in the store {[*self.stored]}, got {version}")
        return self.stored[version]

    async def set_label(self, label: str) -> None:
        await self._enter("set_label")
        self.label = label

    async def scale(self, wanted: int | None) -> SizeStatus:
        await self._enter("scale")
        if wanted is not None and wanted > 4:
            raise InvalidRequest(f"replicas: expected 1 to 4, got {wanted}")
        running = len(self.serving)
        return SizeStatus(wanted=wanted, least=1, most=4, running=running, joining=0, leaving=0, problem=None)

    async def fleet(self) -> FleetStatus:
        await self._enter("fleet")
        return status(self.version, self.serving, label=self.label, round_id=self.round_id)

    async def health(self) -> Health:
        await self._enter("health")
        serving = len(self.serving)
        word = "ok" if serving else "starting"
        return Health(status=word, serving=serving, members=serving, weight_version=self.version)

    async def rounds(self) -> list[RoundReport]:
        await self._enter("rounds")
        return list(self.reports)

    async def events(self, since: int, wait_s: float) -> list[Event]:
        await self._enter("events")
        return [event for event in self.recorded if event.event_id > since]

    # -- adapters: `test_adapter_routes` has the real controller -------------------------------

    async def load_adapter(self, name: str, path: str, *options: Any) -> Any:
        await self._enter("load_adapter")
        raise NotFound(f"lora_path: {path} does not exist")

    async def unload_adapter(self, name: str) -> None:
        await self._enter("unload_adapter")
        raise NotFound(f"The lora adapter '{name}' cannot be found.")

    async def adapters(self) -> list[AdapterStatus]:
        return []

    # -- refusals -----------------------------------------------------------------------------

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(self.delay_s.get(method, 0.0))
        if (error := self.fail_next.pop(method, None)) is not None:
            raise error
        if method in self.dies_before:
            self.dies_before.discard(method)
            self.die()

    def _leave(self, method: str) -> None:
        if method in self.dies_after:
            self.dies_after.discard(method)
            self.die()

    def die(self) -> None:
        """The process is gone; its successor knows what was decided, and no lease."""
        if self.round_id is not None:
            aborted = report(self.round_id, self.version + 1, phase="aborted")
            self.reports.append(replace(aborted, reason="the controller restarted"))
        self.round_id, self.lease, self.init_info = None, None, None
        raise ActorDiedError

    def _acquire(self, publisher: str) -> Lease:
        if self.lease is not None and self.lease.publisher != publisher:
            raise Conflict(f"{self.lease.publisher!r} publishes", {"holder": self.lease.publisher})
        self._last_token += 1
        self.lease = Lease(publisher=publisher, token=self._last_token, duration_s=self.lease_s)
        self.round_id, self.joined = None, 0
        return self.lease

    def _holder(self, token: int) -> Lease:
        if self.lease is None or self.lease.token != token:
            raise StalePublisher(f"token {token} is stale", {"token": token, "last_token": self._last_token})
        return self.lease

    def _no_round(self, action: str) -> None:
        if self.round_id is not None:
            raise Conflict(f"cannot {action} while round {self.round_id} is staging")

    def _undecided(self, round_id: int) -> None:
        if round_id != self.round_id:
            raise Conflict(f"round {round_id} is not open")

    def _answer(self, operation: Operation, replica_id: str) -> JsonValue:
        match operation:
            case IsPaused() | IsSleeping():
                return replica_id == self.serving[0]  # one of two
            case AbortRequests():
                return 2
            case WakeUp():
                return replica_id not in self.sleepers
            case ResetPrefixCache():
                return replica_id not in self.busy or operation.reset_running_requests
            case WeightChecksums():
                return list(self.checksums[replica_id])
        return None
