"""The controller's port over the real ledger, with two replicas that do everything at once, and faults.

It is made in 1 ms of processor time and lives in virtual time. `ControllerInProcess`, the real controller
with a journal on the disk, is made in 20.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from ray.exceptions import ActorDiedError

from deployments.ledger.decisions import Committed, Ended, Opened
from deployments.ledger.publisher_session import gives_way
from deployments.ledger.state import PendingCall
from deployments.protocol import engine_state
from deployments.protocol.adapters import AdapterStatus, LoadRequest
from deployments.protocol.errors import InvalidRequest, NotFound
from deployments.protocol.ledger_config import SizeLimits
from deployments.protocol.poll import CommitMode, FilePart, KvCache
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport
from deployments.protocol.responses import Event, FleetStatus, Health
from deployments.rollouts.store import Rollouts
from tests.app.http.fake_status import report
from tests.deployments.ledger.ledger_scene import Scene

VERSION = 3  # that the fleet serves at first
NEVER_S = 1e9
FORMER = [
    Opened(round_id=VERSION),
    Committed(
        round_id=VERSION,
        version=VERSION,
        label=None,
        participants=(),
        commit=CommitMode.TOGETHER,
        kv_cache=KvCache.RECOMPUTE,
        in_flight=engine_state.InFlight.KEEP,
    ),
    Ended(report=report(VERSION, VERSION)),
]


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
    """A publisher's calls are the ledger's; operations are answered here. `http` is connected.

    Attributes:
        calls: the names of the methods that were called.
        fail_next: method name -> the error of its next call.
        dies_before, dies_after: methods in whose next call the process dies, before or after it carried the
            call out; its successor is there at once.
        delay_s: method name -> how long its calls take.
        sent, operations, options: what was received.
        busy: replicas whose prefix cache cannot be reset, because requests hold blocks.
    """

    def __init__(self, replicas: int = 2) -> None:
        self.calls: list[str] = []
        self.renewals = 0  # by joins
        self.fail_next: dict[str, Exception] = {}
        self.dies_before: set[str] = set()
        self.dies_after: set[str] = set()
        self.delay_s: dict[str, float] = {}
        self.sent: list[JsonValue | FilePart] = []
        self.stored: dict[int, str] = {}  # directories by version
        self.operations: list[engine_state.Operation] = []
        self.options: list[RoundOptions] = []
        self.recorded: list[Event] = []
        self._scene = Scene(
            size=SizeLimits(most=4, fixed=None),
            heartbeat_timeout_s=NEVER_S,
            stage_timeout_s=NEVER_S,
            commit_timeout_s=NEVER_S,
        )
        self._scene.journal = [*FORMER]
        self._scene.restart()
        for _ in range(replicas):
            self._scene.start(world_size=2, version=VERSION)
        self._scene.connect(publisher="http")
        self._scene.ledger.release(self._scene.token, self._scene.now)
        self.lease_s = self._scene.config.lease_s
        self.busy: set[str] = set()
        self.checksums: dict[str, list[dict[str, str]]] = {name: [{"w": "aa"}] for name in self.serving}

    @property
    def serving(self) -> Sequence[str]:
        return [each.replica_id for each in self._scene.replicas]

    @serving.setter
    def serving(self, names: Sequence[str]) -> None:
        """The others are lost."""
        scene = self._scene
        lost = [each for each in scene.replicas if each.replica_id not in names]
        scene.ledger.lost([(each.replica_id, each.incarnation) for each in lost], "gone", scene.now)
        scene.replicas = [each for each in scene.replicas if each not in lost]

    @property
    def lease(self) -> Lease | None:
        """None: another publisher may have it."""
        state = self._scene.ledger.state
        return None if gives_way(state) else state.publisher.lease

    @property
    def round_id(self) -> int | None:
        current = self._scene.ledger.state.round
        return None if current is None else current.round_id

    @property
    def version(self) -> int:
        return self._scene.ledger.state.committed_version

    @property
    def label(self) -> str | None:
        return self._scene.ledger.state.label

    @property
    def reports(self) -> list[RoundReport]:
        return self._scene.ledger.history()

    # -- the ledger's calls -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Any of the ledger's, carried out by all replicas when it returns."""
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any) -> Any:
            await self._enter(name)
            result = self._ask(name, *args)
            if name in self.dies_after:
                self.dies_after.discard(name)
                self._die()
            return result

        return call

    async def join_lease(self, publisher: str, renew: bool) -> JoinedLease:
        await self._enter("join_lease")
        self.renewals += renew
        joined: JoinedLease = self._ask("join_lease", publisher, renew=renew)
        return joined

    async def fleet(self) -> FleetStatus:
        await self._enter("fleet")
        status: FleetStatus = self._ask("status")
        return status

    async def health(self) -> Health:
        await self._enter("health")
        return self._scene.ledger.health()

    async def rounds(self, after: int = 0) -> list[RoundReport]:
        await self._enter("rounds")
        return self._scene.ledger.history(after)

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        if name == "send":
            self.sent.append(args[2])
        elif name == "open_round":
            self.options.append(args[1])
        scene = self._scene
        scene.now = 100.0 + asyncio.get_running_loop().time()
        scene.poll(1)
        result = getattr(scene.ledger, name)(*args, scene.now, **options)
        if isinstance(result, PendingCall):
            scene.poll(10)
            assert result.done, f"{name} waits for {result.waiting}"
            if result.error is not None:
                raise result.error
            result = result.result
        scene.journal += scene.ledger.take_decisions()
        return result

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(self.delay_s.get(method, 0.0))
        if (error := self.fail_next.pop(method, None)) is not None:
            raise error
        if method in self.dies_before:
            self.dies_before.discard(method)
            self._die()

    def _die(self) -> None:
        self._scene.restart()
        self._scene.poll()
        raise ActorDiedError

    # -- not the ledger's ---------------------------------------------------------------------

    async def call(self, operation: engine_state.Operation) -> dict[str, JsonValue]:
        await self._enter("call")
        self.operations.append(operation)
        return {replica_id: self._answer(operation, replica_id) for replica_id in self.serving}

    def _answer(self, operation: engine_state.Operation, replica_id: str) -> JsonValue:
        match operation:
            case engine_state.IsPaused() | engine_state.IsSleeping():
                return replica_id == self.serving[0]  # one of two
            case engine_state.AbortRequests():
                return 2
            case engine_state.WakeUp():
                return True
            case engine_state.ResetPrefixCache():
                return replica_id not in self.busy or operation.reset_running_requests
            case engine_state.WeightChecksums():
                return list(self.checksums[replica_id])
        return None

    async def rollback_source(self, version: int) -> str:
        await self._enter("rollback_source")
        if version not in self.stored:
            raise InvalidRequest(f"version: expected one in the store {[*self.stored]}, got {version}")
        return self.stored[version]

    async def stored_versions(self) -> list[int]:
        await self._enter("stored_versions")
        return [*self.stored]

    async def events(self, since: int, wait_s: float) -> list[Event]:
        await self._enter("events")
        return [event for event in self.recorded if event.event_id > since]

    # -- adapters: `test_adapter_routes` has the real controller -------------------------------

    async def load_adapter(self, load: LoadRequest) -> Any:
        await self._enter("load_adapter")
        raise NotFound(f"lora_path: {load.path} does not exist")

    async def unload_adapter(self, name: str) -> None:
        await self._enter("unload_adapter")
        raise NotFound(f"The lora adapter '{name}' cannot be found.")

    async def rollouts(self, name: str, *arguments: Any) -> Any:
        return await Rollouts(Path(), None, "").call(name, {}, *arguments)  # off, as without the setting

    async def adapters(self) -> list[AdapterStatus]:
        return []
