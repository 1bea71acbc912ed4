"""The controller: the ledger with a clock, a disk and long polls.

replica    poll ──► waits up to `poll_s` for updates of its own ──► Directive
publisher  connect, send, close_round ──► waits until the replicas have answered
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from deployments.calls.rpc import CallAddress, CallServer
from deployments.controller.durable_ledger import DurableLedger, open_journal
from deployments.controller.journal import Journal
from deployments.controller.ray_cluster import IsAlive, Kill
from deployments.controller.store_keeper import StoreKeeper, hold_claim
from deployments.host import tracing
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import Adapter, AdapterStatus, LoadRequest
from deployments.protocol.engine_state import Operation
from deployments.protocol.errors import FleetUnavailable, InvalidRequest, JournalError, SlipstreamError
from deployments.protocol.ledger_config import FIXED, AdapterLimits, LedgerConfig, SizeLimits
from deployments.protocol.poll import (
    Directive,
    FilePart,
    JoinAnswer,
    Report,
    Scores,
    StoredVersion,
    Unloadable,
)
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport
from deployments.protocol.responses import Event, FleetStatus, Health, SizeStatus
from deployments.protocol.rollouts import RolloutLimits
from deployments.rollouts.store import Rollouts
from deployments.weights.store.versions import Store

BUSY_POLL_S = 0.2  # a replica that runs an instruction polls again soon
MAX_EVENTS_WAIT_S = 30.0
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue, config=ConfigDict(ser_json_inf_nan="constants"))
_JSON_KINDS = ("list", "dict", "str", "int", "float", "bool", "none")


class Controller:
    """Serve's deployment class of the controller; one per fleet.

    Args:
        model: versions of another model in `state_dir` are not served. None: not known.
        state_dir: where decisions are kept; a restarted controller needs the same one.
        store_dir: committed versions: `max_versions`, and those that are being read.
        is_alive: whether the process of a replica (by id) exists; runs in a thread, as `kill` does.
        kill: kills the process of a replica that is lost because it hangs.
        adapter_roots: directories below which adapters may be loaded.
        rollouts: None: no rollout is captured.
        poll_s: how long a poll without updates waits.
        silent_s: the process of a replica that has not polled for this long is looked up; more than `poll_s`.
        clock: seconds, monotonic.

    Raises:
        JournalError: the state directory cannot be used, has adapters that no replica takes or versions of
            another model, or the store is another fleet's or cannot be used.
    """

    def __init__(
        self,
        *,
        config: LedgerConfig,
        model: str | None = None,
        state_dir: str,
        store_dir: str,
        is_alive: IsAlive,
        kill: Kill,
        size: SizeLimits = FIXED,
        adapters: AdapterLimits | None = None,
        adapter_roots: Sequence[Path] = (),
        rollouts: RolloutLimits | None = None,
        max_versions: int = 3,
        poll_s: float = 1.0,
        silent_s: float = 2.0,
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        open_journal: Callable[[Path], Journal] = open_journal,
        hold_claim: Callable[[Path], int | None] = hold_claim,
    ) -> None:
        self._config = config
        self._ledger = Ledger(config, size, adapters)
        self._poll_s = poll_s
        self._keeper = StoreKeeper(
            Store(Path(store_dir)),
            self._ledger,
            Path(state_dir),
            max_versions,
            hold_claim,
            adapter_roots=adapter_roots,
            clock=clock,
        )
        self._durable = DurableLedger(
            self._ledger,
            self._keeper,
            Path(state_dir),
            is_alive=is_alive,
            kill=kill,
            silent_s=silent_s,
            tick_s=tick_s,
            clock=clock,
            open_journal=open_journal,
        )
        try:
            self._keeper.claim()
            _check_model(self._ledger, model, Path(state_dir))
            self._rollouts = Rollouts(Path(state_dir), rollouts, self._ledger.state.fleet_id)
            _check_adapters(self._ledger, None if adapters is None else adapters.refusal, Path(state_dir))
        except JournalError:
            self._durable.release()
            raise
        self._calls = CallServer(self)
        self._polls: dict[str, object] = {}  # incarnation -> its newest poll, which supersedes older ones
        self._round_trace: Mapping[str, str] = {}
        self._told: dict[str, int] = {}  # incarnation -> decisions that must be durable before it is told

    # All calls raise SlipstreamError; those with a token StalePublisher if it is not the current one.

    async def acquire(self, publisher: str) -> Lease:
        async with self._durable.answer(records=True):
            return self._ledger.acquire(publisher, self._durable.now())

    async def join_lease(self, publisher: str, renew: bool) -> JoinedLease:
        async with self._durable.answer():
            return self._ledger.join_lease(publisher, self._durable.now(), renew=renew)

    async def renew(self, token: int) -> Lease:
        """Call it well within the lease's duration, also during another call."""
        async with self._durable.answer():
            return self._ledger.renew(token, self._durable.now())

    async def release(self, token: int) -> None:
        async with self._durable.answer():
            self._ledger.release(token, self._durable.now())

    async def connect(self, token: int, init_info: Mapping[str, JsonValue]) -> None:
        """Returns once every replica is connected. Raises Conflict: a replica is gone."""
        async with self._durable.answer():
            checked = json_only(init_info, "init_info")
            if not isinstance(checked, dict):
                raise InvalidRequest(f"init_info: expected an object, got {type(init_info).__name__}")
            await self._durable.wait(self._ledger.is_complete, None)  # ranks count all serving replicas
            await self._durable.result(self._ledger.connect(token, checked, self._durable.now()))

    async def disconnect(self, token: int) -> dict[str, JsonValue]:
        async with self._durable.answer():
            return dict(await self._durable.result(self._ledger.disconnect(token, self._durable.now())))

    async def open_round(self, token: int, options: RoundOptions | None = None) -> int:
        """Raises Conflict: a round is open, the weights sleep, or connect again."""
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            self._round_trace = tracing.headers()
            return self._ledger.open_round(token, options or RoundOptions(), self._durable.now())

    async def send(self, token: int, round_id: int, payload: JsonValue | FilePart) -> None:
        """Returns once every participant has received. A collective's data must flow meanwhile."""
        async with self._durable.answer():
            checked = payload if isinstance(payload, FilePart) else json_only(payload, "payload")
            await self._durable.result(self._ledger.send(token, round_id, checked, self._durable.now()))

    async def close_round(self, token: int, round_id: int, label: str | None = None) -> RoundReport:
        async with self._durable.answer():
            call = self._ledger.close_round(token, round_id, label, self._durable.now())
            return await self._durable.result(call)

    async def abort_round(self, token: int, round_id: int, reason: str) -> None:
        async with self._durable.answer():
            self._ledger.abort_round(token, round_id, reason, self._durable.now())

    async def load_adapter(self, load: LoadRequest) -> Adapter:
        """See `Ledger.stage_adapter`."""
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            if load.load_id:
                await self._durable.wait(lambda: self._ledger.adapter_settled(load.load_id), None)
                if (found := self._ledger.adapter_loaded(load.load_id)) is not None:
                    return found
            now = self._durable.now
            call: PendingCall | None = None
            adapter = self._ledger.begin_adapter(load, now())
            try:
                await self._durable.durable(self._durable.change())  # no successor reuses this id
                files = await self._keeper.copy_adapter(load.path, adapter.adapter_id, load.digest)
                call = self._ledger.stage_adapter(adapter, files, now())
                self._durable.change()  # replicas load the copy while it is synced
                await self._keeper.complete_adapter(adapter.adapter_id)
                self._ledger.complete_adapter(adapter, now())
            except BaseException as error:  # even if the caller left: frees the name
                failure = error if isinstance(error, SlipstreamError) else FleetUnavailable(str(error))
                self._ledger.fail_adapter(adapter, failure, now())
                if call is None or failure is not error:
                    raise
            return await self._durable.result(call)

    async def unload_adapter(self, name: str) -> None:
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            call = self._ledger.unload_adapter(name, self._durable.now())
            await self._durable.result(call)

    async def adapters(self) -> list[AdapterStatus]:
        async with self._durable.answer():
            return self._ledger.adapters()

    async def rollouts(self, name: str, *arguments: Any) -> Any:
        self._durable.enter()
        live = [each for each in self._ledger.adapters() if each.state == "live"]
        versions = {each.name: each.version for each in sorted(live, key=lambda each: each.version)}
        current = {**versions, "": self._ledger.state.committed_version}
        return await self._rollouts.call(name, current, *arguments)

    async def join(
        self, replica_id: str, incarnation: str, unloadable: Unloadable | None = None
    ) -> JoinAnswer:
        async with self._durable.answer():
            return self._ledger.join(replica_id, incarnation, self._durable.now(), unloadable)

    async def stored_version(self, version: int, path: str) -> StoredVersion:
        """What a trainer's host must have at `path`, and which replicas may give it."""
        async with self._durable.answer():
            return self._ledger.stored_version(version, path)

    async def call_address(self) -> CallAddress:
        """The only method that is called over Serve's handle."""
        self._durable.enter()
        return await self._calls.address()

    async def poll(self, report: Report) -> Directive:
        """Raises FleetUnavailable: a newer poll of this replica came first or superseded this one."""
        self._durable.enter()
        follows = self._ledger.on_report(report, self._durable.now())
        looked = self._durable.look_soon() if follows else self._durable.looks
        supersedes = report.incarnation in self._polls
        mine = self._polls[report.incarnation] = object()
        self._durable.change(wake=supersedes)

        def ready() -> bool:
            superseded = self._polls.get(report.incarnation) is not mine
            return superseded or (self._durable.looks >= looked and self._ledger.has_updates(report))

        try:
            await self._durable.wait(ready, BUSY_POLL_S if self._ledger.is_busy(report) else self._poll_s)
            if self._polls.get(report.incarnation) is not mine:
                raise FleetUnavailable(f"a newer poll of {report.replica_id} superseded this one")
            has_updates = self._ledger.has_updates(report)
            directive = self._ledger.directive(report)
            if self._round_trace:
                directive = replace(directive, trace=self._round_trace)
            made = self._durable.change(wake=False)
            # A directive without updates is a heartbeat: no wait for a slow disk.
            if has_updates or report.incarnation not in self._told:
                self._told[report.incarnation] = made
            await self._durable.durable(self._told[report.incarnation])
            if directive.fenced is not None:
                self._told.pop(report.incarnation, None)
            return directive
        finally:
            if self._polls.get(report.incarnation) is mine:
                del self._polls[report.incarnation]

    async def call(self, operation: Operation) -> dict[str, JsonValue]:
        """Results by replica id. Raises ReplicaUnavailable: names the replicas that did not run it."""
        async with self._durable.answer():
            await self._durable.wait(self._ledger.is_complete, None)
            return dict(await self._durable.result(self._ledger.call(operation, self._durable.now())))

    async def reconfigure(self, settings: Mapping[str, JsonValue]) -> None:
        self._ledger.reconfigure(LedgerConfig.model_validate({**self._config.model_dump(), **settings}))

    async def stored(self, version: int, path: str, label: str | None = None) -> None:
        async with self._durable.answer():
            self._ledger.set_stored(version, path, label, self._durable.now())

    async def not_stored(self, version: int, reason: str) -> None:
        async with self._durable.answer():
            self._ledger.set_unstored(version, reason, self._durable.now())

    async def rollback_source(self, version: int) -> str:
        return await asyncio.to_thread(self._keeper.source, version)

    async def stored_versions(self) -> list[int]:
        return await asyncio.to_thread(self._keeper.versions)

    async def scale(self, wanted: int | None) -> SizeStatus:
        async with self._durable.answer(records=True):
            return self._ledger.scale(wanted, self._durable.now())

    async def set_scores(self, scores: Scores) -> None:
        async with self._durable.answer():
            self._ledger.set_scores(scores, self._durable.now())

    async def set_label(self, label: str) -> None:
        async with self._durable.answer(records=True):
            self._ledger.set_label(label, self._durable.now())

    async def fleet(self) -> FleetStatus:
        async with self._durable.answer(asks=True):
            return self._ledger.status(self._durable.now())

    async def health(self) -> Health:
        async with self._durable.answer(asks=True):
            return self._ledger.health()

    async def rounds(self, after: int = 0) -> list[RoundReport]:
        """Oldest first."""
        async with self._durable.answer(asks=True):
            return self._ledger.history(after)

    async def events(self, since: int = 0, wait_s: float = 0.0) -> list[Event]:
        """Events with a greater id than `since`; waits for the first one, at most `wait_s` seconds."""
        async with self._durable.answer(asks=True):
            limit_s = min(wait_s, MAX_EVENTS_WAIT_S)
            await self._durable.wait(lambda: bool(self._ledger.events_since(since)), limit_s)
            wall = time.time() - self._durable.now()
            return [replace(it, at=round(it.at + wall, 3)) for it in self._ledger.events_since(since)]

    async def check_health(self) -> None:
        self._durable.enter()

    async def aclose(self) -> None:
        await self._calls.aclose()
        await self._rollouts.aclose()
        await self._durable.aclose()
        await self._keeper.aclose()


def _check_model(ledger: Ledger, model: str | None, state_dir: Path) -> None:
    other = None if model is None else ledger.serve(model)
    if other is not None:
        raise JournalError(
            f"{state_dir} has versions of the model {other!r}, and 'model' is {model!r}: engines would load "
            "the former, and answer under the new name. To serve another model, move that directory away or "
            "set 'state_dir' to a new one; if it is the same model elsewhere, link its former path to it"
        )


def _check_adapters(ledger: Ledger, refusal: str | None, state_dir: Path) -> None:
    """Engines load all live adapters: one that takes none would never serve. `refusal`: how to make replicas
    take adapters."""
    live = [f"{each.name}@{each.version}" for each in ledger.adapters() if each.state == "live"]
    if refusal is not None and live:
        raise JournalError(
            f"{state_dir} has {len(live)} live adapters, among them {live[-1]!r}, and no replica would load "
            f"them: {refusal}, and unload them there if they are not needed any more; or move that directory "
            "away, or set 'state_dir' to a new one"
        )


def json_only(value: object, name: str) -> JsonValue:
    """Raises InvalidRequest, with the place of a tensor or another object."""
    try:
        return _JSON.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join([name, *(str(part) for part in first["loc"] if part not in _JSON_KINDS)])
        raise InvalidRequest(
            f"{path}: expected JSON types only (no tensors, no bytes), got {type(first['input']).__name__}"
        ) from None
