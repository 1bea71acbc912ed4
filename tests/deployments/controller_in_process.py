"""The real controller with fake replicas, in this process, for tests of its callers: with faults.

caller ─ handle.method.remote(...) ─► faults ─► controller ◄─ polls ─ replicas
                                                on an event loop in a thread of its own
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ray.exceptions import ActorDiedError

from deployments.protocol.errors import FleetUnavailable, TransferFailed
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig
from deployments.protocol.poll import Body, Receive, Verify
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.protocol.responses import FleetStatus
from tests.deployments.controller.fleet import Fleet
from tests.deployments.ledger.fake_replica import FakeReplica

Fate = Literal["before", "after"]  # it died before or after it carried a call out
LEASE_S = 60.0
CONTROLLER_THREAD = "controller"
NEVER_S = 1e9
ANSWER_TIMEOUT_S = 60.0  # of real time: the controller waits for something that the test forgot
# Replicas poll in real time, and the clock is the test's: no replica is late by it.
CONFIG = LedgerConfig(
    outside_versions=False,
    lease_s=LEASE_S,
    heartbeat_timeout_s=NEVER_S,
    stage_timeout_s=NEVER_S,
    commit_timeout_s=NEVER_S,
    call_timeout_s=NEVER_S,
)


class ReadingReplica(FakeReplica):
    """Reads and digests what the transport `shm` sends."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.received: dict[str, Any] = {}  # tensors of the last round, by name
        self._round_received = 0

    def carry_out(self, body: Body) -> Any:
        value = super().carry_out(body)
        match body:
            case Receive(payload={"segment": _} as payload):
                if self._round_received != body.round_id:
                    self._round_received, self.received = body.round_id, {}
                self.received |= _read(payload)
            case Verify() if self._round_received == body.round_id:
                return replace(value, digest=_digest(self.received))
        return value


def _read(payload: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a payload, by name. Its segment is gone if the publisher has given the round up."""

    from deployments.weights.transports.shm import open_segment
    from deployments.weights.wire.chunk_layout import parse, plan_chunks

    metadata = parse(payload["names"], payload["dtype_names"], payload["shapes"])
    (chunk,) = plan_chunks(metadata, chunk_bytes=1 << 62)
    try:
        block = open_segment(payload["segment"], chunk.size_bytes)
    except (OSError, ValueError) as error:
        raise TransferFailed(str(error)) from error
    return {
        each.name: block[each.offset : each.offset + each.size_bytes]
        .clone()
        .view(each.dtype)
        .reshape(each.shape)
        for each in chunk.entries
    }


def _digest(tensors: dict[str, Any]) -> str:
    from deployments.weights.wire.digest import digest
    from deployments.weights.wire.digest_definition import version_digest

    return version_digest(list(tensors), [digest(each) for each in tensors.values()])


class ControllerInProcess:
    """Stands where a `CallHandle` of the controller does: `await handle.method.remote(...)`.

    Its clock stands still.

    Args:
        directory: of the controller's state, of the store and of adapters' files.
        replicas: how many serve from the start.
        shared_store: hosts share the store.

    Attributes:
        calls: the methods in the order in which they began.
        last: the arguments of each method's last call.
        fails: by method, what its next call raises in place of being carried out.
        dies_in: methods in whose next call the process dies, before or after it carried the call out.
        loses: methods that are carried out, and whose answers are lost.
    """

    def __init__(self, directory: Path, replicas: int = 1, *, shared_store: bool = True) -> None:
        self._config = CONFIG.model_copy(update={"shared_store": shared_store})
        self.calls: list[str] = []
        self.last: dict[str, tuple[Any, ...]] = {}
        self.fails: dict[str, Exception] = {}
        self.dies_in: dict[str, Fate] = {}
        self.loses: set[str] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_up = asyncio.Event()  # not while it restarts: calls wait
        self._is_up.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=CONTROLLER_THREAD, daemon=True)
        self._thread.start()
        self._fleet = self._run(self._new_fleet(directory))
        for _ in range(replicas):
            self.add_replica()

    def __getattr__(self, name: str) -> "Method":
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def answer(self, method: str, *args: Any) -> Any:
        """A call of a publisher, with the faults that are due."""
        self.calls.append(method)
        self.last[method] = args
        fate = self.dies_in.pop(method, None)
        if fate == "before":
            self.restart()
            raise ActorDiedError
        if (error := self.fails.pop(method, None)) is not None:
            raise error
        result = self.ask(method, *args)
        if fate == "after":
            self.restart()
            raise ActorDiedError
        if method in self.loses:
            raise FleetUnavailable(f"{method}: no answer within 120 s")
        return result

    def ask(self, method: str, *args: Any) -> Any:
        """A call of the test itself: without faults, and not among `calls`."""
        return self._run(self._call(method, args))

    def restart(self, *silent: str) -> None:
        """A new process on the same disk, which all replicas but the silent ones find."""
        self._run(self._restart(silent))

    def close(self) -> None:
        """No call is answered any more; it may be closed already."""
        if self._loop.is_closed():
            return
        self._run(self._fleet.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- the fleet ----------------------------------------------------------------------------

    @property
    def replica(self) -> ReadingReplica:
        """The first one."""
        first: ReadingReplica = self._fleet.replicas["r0"]  # type: ignore[assignment]
        return first

    @property
    def received(self) -> dict[str, Any]:
        """The tensors of the last round."""
        return self.replica.received

    @property
    def status(self) -> FleetStatus:
        status: FleetStatus = self.ask("fleet")
        return status

    @property
    def live(self) -> list[str]:
        """Adapters that requests can name, oldest first."""
        return [f"{each.name}@{each.version}" for each in self.ask("adapters") if each.state == "live"]

    def directory_of(self, version: int) -> Path:
        """Where a version is in the store."""
        return Path(self.ask("rollback_source", version))

    def add_replica(self) -> None:
        """Another one serves; it has the committed version."""
        name, version = f"r{len(self._fleet.replicas)}", self.status.committed_version
        self._run(self._follow(ReadingReplica(replica_id=name, incarnation=f"{name}-1", version=version)))

    def resume(self, replica_id: str) -> None:
        """One that was silent follows the controller again."""
        self._run(self._follow(self._fleet.replicas[replica_id]))

    def connect_as(self, publisher: str, init_info: dict[str, Any] | None = None) -> None:
        """Another publisher's connection, without its lease."""
        token = self.ask("acquire", publisher).token
        self.ask("connect", token, init_info or {})
        self.ask("release", token)

    def publish_as(self, publisher: str, init_info: dict[str, Any] | None = None) -> RoundReport:
        """A round of another publisher, whose tensors nobody reads."""
        self.connect_as(publisher, init_info)
        token = self.ask("acquire", publisher).token
        round_id = self.ask("open_round", token, RoundOptions())
        self.ask("send", token, round_id, {})
        report: RoundReport = self.ask("close_round", token, round_id, None)
        self.ask("release", token)
        return report

    async def _new_fleet(self, directory: Path) -> Fleet:
        return Fleet(directory, self._config, adapters=AdapterLimits(), max_versions=1000)

    async def _call(self, method: str, args: Sequence[Any]) -> Any:
        await self._is_up.wait()
        call = asyncio.create_task(getattr(self._fleet.controller, method)(*args))
        self._running.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            raise ActorDiedError from None
        finally:
            self._running.discard(call)

    async def _restart(self, silent: Sequence[str]) -> None:
        self._is_up.clear()
        for call in self._running:
            call.cancel()
        await self._fleet.restart(*silent)
        self._is_up.set()
        await self._fleet.polled(*(each for each in self._fleet.replicas if each not in silent))

    async def _follow(self, replica: FakeReplica) -> None:
        self._fleet.add(replica)
        await self._fleet.admitted(replica.replica_id)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop.is_closed():  # asked by a thread of a worker, which outlives its test
            coroutine.close()
            return None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_TIMEOUT_S)


class Method:
    """One method of the controller."""

    def __init__(self, controller: ControllerInProcess, name: str) -> None:
        self._controller = controller
        self._name = name

    def remote(self, *args: Any) -> "asyncio.Task[Any]":
        return asyncio.create_task(asyncio.to_thread(self._controller.answer, self._name, *args))
