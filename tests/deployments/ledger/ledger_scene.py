"""A ledger with fake replicas, a virtual clock and a disk, for the tables."""

from typing import Any

from deployments.ledger.decisions import Decision, decode, encode
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol import engine_state
from deployments.protocol.adapters import Adapter, AdapterFiles, LoadRequest
from deployments.protocol.ledger_config import FIXED, AdapterLimits, LedgerConfig, SizeLimits
from deployments.protocol.poll import JoinAnswer, RunOperation, Unloadable
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.protocol.responses import FleetStatus
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica

GROUP = {"rank_offset": 1}  # what makes a connection a communicator
SEPARATE: dict[str, int] = {}


class Scene:
    """A ledger, its replicas, a clock and a disk."""

    limits = AdapterLimits()

    def __init__(
        self, replicas: int = 0, world_size: int = 1, size: SizeLimits = FIXED, **config: Any
    ) -> None:
        self.config = LedgerConfig(**config)
        self.size = size
        self.now = 100.0
        self.journal: list[Decision] = []
        self.ledger = Ledger(self.config, self.size, self.limits)
        self.ledger.recover([], self.now)
        self.replicas: list[FakeReplica] = []
        self.token = 0
        for _ in range(replicas):
            self.start(world_size=world_size)

    def start(self, **fields: Any) -> FakeReplica:
        name = f"r{len(self.replicas)}"
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", **fields)
        self.replicas.append(replica)
        self.poll(1)
        return replica

    def poll(self, times: int = 3, *, only: list[FakeReplica] | None = None) -> None:
        for _ in range(times):
            for replica in self.replicas if only is None else only:
                directive = self.ledger.poll(replica.report(), self.now)
                self.journal += self.ledger.take_decisions()
                replica.take(directive)

    def wait(self, elapsed_s: float, *, poll: bool = True) -> None:
        """Let time pass second by second, with replicas that poll."""
        for _ in range(int(elapsed_s)):
            self.now += 1.0
            if poll:
                self.poll(1)
            self.ledger.tick(self.now)

    def connect(self, init_info: dict[str, Any] | None = None, publisher: str = "trainer") -> PendingCall:
        self.token = self.ledger.acquire(publisher, self.now).token
        call = self.ledger.connect(self.token, {} if init_info is None else init_info, self.now)
        self.poll()
        return call

    def open(
        self, *, after: int | None = None, persist: bool = False, file_bytes: int | None = None, **config: Any
    ) -> int:
        """Open a round, with other settings for `config`; no replica has received anything of it yet."""
        self.ledger.reconfigure(self.config.model_copy(update=config))
        options = RoundOptions(after=after, persist=persist, file_bytes=file_bytes)
        return self.ledger.open_round(self.token, options, self.now)

    def send(self, round_id: int, payload: Any = None) -> PendingCall:
        return self.ledger.send(self.token, round_id, {} if payload is None else payload, self.now)

    def receive(self, **options: Any) -> int:
        """Open a round, and have its payload received."""
        round_id = self.open(**options)
        call = self.send(round_id)
        self.poll()
        if call.error is not None:
            raise call.error
        return round_id

    def close(self, round_id: int, label: str | None = None) -> PendingCall:
        return self.ledger.close_round(self.token, round_id, label, self.now)

    def publish(self, label: str | None = None, **options: Any) -> PendingCall:
        self.connect()
        call = self.close(self.receive(**options), label)
        self.poll(10)
        return call

    def ask(self, text: str) -> PendingCall:
        """An operation on the fleet, see `operation`; nothing is delivered yet."""
        return self.ledger.call(operation(text), self.now)

    def call(self, text: str) -> PendingCall:
        call = self.ask(text)
        self.poll()
        return call

    def restart(self) -> None:
        self.journal += self.ledger.take_decisions()
        self.ledger = Ledger(self.config, self.size, self.limits)
        self.ledger.recover(self.journal, self.now)
        self.journal += self.ledger.take_decisions()

    def status(self) -> FleetStatus:
        return self.ledger.status(self.now)

    def state_of(self, replica: FakeReplica) -> str:
        members = self.status().members
        return next((each.state for each in members if each.replica_id == replica.replica_id), "gone")


def report_of(call: PendingCall) -> RoundReport:
    assert call.done and call.error is None, call.error
    report: RoundReport = call.result
    return report


def operation(text: str) -> engine_state.Operation:
    """`sleep 2`, `wake_up weights,kv_cache`, `pause keep`: an operation and its argument."""
    name, _, argument = text.partition(" ")
    match name:
        case "sleep":
            level, _, mode = argument.partition(" ")
            return engine_state.Sleep(level=int(level), mode=engine_state.InFlight(mode or "abort"))
        case "wake_up":
            return engine_state.WakeUp(
                tags=tuple(engine_state.SleepTag(tag) for tag in argument.split(",")) if argument else None
            )
        case "pause":
            return engine_state.Pause(mode=engine_state.InFlight(argument))
        case "resume":
            return engine_state.Resume()
        case "is_paused":
            return engine_state.IsPaused()
        case "reset_prefix_cache":
            return engine_state.ResetPrefixCache()
        case "is_sleeping":
            return engine_state.IsSleeping()
        case "abort_requests":
            return engine_state.AbortRequests()
        case "weight_checker":
            return engine_state.WeightChecksums()
        case "disconnect":
            return engine_state.Disconnect()
    raise ValueError(f"unknown operation {text!r}")


def condition(texts: list[str]) -> engine_state.EngineState:
    return tuple(
        each
        for text in texts
        if isinstance(
            each := operation(text),
            engine_state.Pause | engine_state.Resume | engine_state.Sleep | engine_state.WakeUp,
        )
    )


def operations(replica: FakeReplica) -> list[str]:
    """The operations that it carried out."""
    return [each.body.operation.name for each in replica.ran if isinstance(each.body, RunOperation)]


class StoreScene(Scene):
    """Every round is stored at once."""

    def round(self) -> int:
        version = report_of(self.publish()).version
        self.store(version)
        return version

    def store(self, version: int) -> None:
        self.ledger.set_stored(version, f"/store/v{version}", None, self.now)

    def begin(self, name: str = "late", unloadable: Unloadable | None = None) -> JoinAnswer:
        """A process that starts; it polls when its engine is up, see `up`."""
        answer = self.ledger.join(name, f"{name}-1", self.now, unloadable)
        self.journal += self.ledger.take_decisions()
        return answer

    def up(self, answer: JoinAnswer, name: str = "late") -> FakeReplica:
        """Its engine is up with what it was told to load."""
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", version=answer.version)
        self.replicas.append(replica)
        self.poll(1)
        return replica


FILES = AdapterFiles(path="/store/adapters/1", digest="d", size_bytes=10)


class AdapterScene(Scene):
    """A scene whose fleet serves adapters."""

    limits = AdapterLimits(base_model="base")

    def begin(self, name: str, **options: Any) -> Adapter:
        return self.ledger.begin_adapter(LoadRequest(name=name, path="/a", **options), self.now)

    def load(self, name: str, *, polls: int = 8, **options: Any) -> PendingCall:
        adapter = self.begin(name, **options)
        call = self.ledger.stage_adapter(adapter, FILES, self.now)
        self.ledger.complete_adapter(adapter, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def unload(self, name: str, *, polls: int = 8) -> PendingCall:
        call = self.ledger.unload_adapter(name, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def restart(self) -> None:
        self.journal = compact([decode(encode(each)) for each in self.journal])
        super().restart()


def live(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.live.values()]


def held(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.held.values()]


def names(scene: AdapterScene, state: str = "live") -> list[str]:
    return [f"{each.name}@{each.version}" for each in scene.ledger.adapters() if each.state == state]


def ended(call: PendingCall) -> object:
    assert call.done and call.error is None, call.error
    return call.result
