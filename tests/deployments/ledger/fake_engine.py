"""An engine without tensors: carries instructions out at once, and fails where a real engine fails.

Below the ledger's `FakeReplica` and the simulation's `SimMember`; a contract test holds it to the real
members.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from deployments.protocol import poll
from deployments.protocol.adapters import Adapter, LoadAdapter, LoadedAdapter, SetAdapters
from deployments.protocol.engine_state import (
    MEMORY_TAGS,
    Disconnect,
    EngineState,
    InFlight,
    Operation,
    Pause,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
    apply,
    asleep,
    is_paused,
)
from deployments.protocol.errors import PayloadRejected


@dataclass(slots=True)
class FakeAdapters:
    """What `deployments.replica.engine_adapters` does, with nothing to load."""

    held: dict[int, Adapter] = field(default_factory=dict)
    live: dict[int, Adapter] = field(default_factory=dict)
    used: Counter[int] = field(default_factory=Counter)  # by requests that run
    doomed: set[int] = field(default_factory=set)

    def load(self, adapter: Adapter) -> LoadedAdapter:
        self.held[adapter.adapter_id] = adapter
        self.doomed.discard(adapter.adapter_id)
        return LoadedAdapter(read_s=0.25, add_s=0.125)

    def set(self, live: list[Adapter], keep: set[int]) -> None:
        missing = [each.full_name for each in live if each.adapter_id not in self.held]
        if missing:
            raise RuntimeError(f"{missing} are not loaded")
        self.live = {each.adapter_id: each for each in live}
        self.doomed = self.held.keys() - self.live.keys() - keep
        self._remove()

    def begin(self, name: str) -> int:
        """A request names an adapter; the id of the version that answers it."""
        [*_, newest] = [each for each in self.live.values() if name in (each.name, each.full_name)]
        self.used[newest.adapter_id] += 1
        return newest.adapter_id

    def end(self, adapter_id: int) -> None:
        assert adapter_id in self.held, "unloaded under a running request"
        self.used[adapter_id] -= 1
        self._remove()

    def _remove(self) -> None:
        for adapter_id in [each for each in self.doomed if not self.used[each]]:
            self.held.pop(adapter_id, None)
            self.doomed.discard(adapter_id)


Value = poll.Staged | poll.Swapped | LoadedAdapter | None


@dataclass(slots=True)
class Memory:
    """The memory of a `ReplicaEngine`, and whether the weights in it are a version's."""

    asleep: frozenset[SleepTag] = frozenset()
    intact: bool = True

    def sleep(self, level: int) -> None:
        if level == 0 or SleepTag.WEIGHTS in self.asleep:
            return
        self.intact = self.intact and level == 1
        self.asleep = MEMORY_TAGS

    def wake_up(self, tags: tuple[SleepTag, ...] | None) -> None:
        self.asleep -= MEMORY_TAGS if tags is None else set(tags)

    @property
    def computes_noise(self) -> bool:
        return not self.asleep and not self.intact


@dataclass(slots=True, kw_only=True, eq=False)
class FakeEngine:
    """Holds versions, staged rounds, requests and adapters; `updates_in_place`: like staging 'none'."""

    version: int = 0
    world_size: int = 1
    staged_round: int | None = None
    receiving_round: int | None = None  # whose payloads are staged, complete or not
    verified: bool = False  # what it received is complete
    staging_intact: bool = False  # no sleep has discarded what the session staged
    retains: bool = True  # False: staging 'none', which has nothing to retain
    retaining: int | None = None  # what the open session is to retain
    retained_version: int | None = None
    loading_version: int | None = None
    initial: poll.InitialWeights | None = None
    store_result: poll.StoreResult | None = None
    store_problem: str = ""  # why it cannot write to the store
    writes_at_once: bool = True
    adapters: FakeAdapters = field(default_factory=FakeAdapters)
    updates_in_place: bool = False
    digest: str = "aa"
    compares: bool = True  # False: its publisher states no digests
    drafter: bool | None = None  # whether a drafter's tensors came; None: it has no drafter
    condition: EngineState = ()
    memory: Memory = field(default_factory=Memory)
    held: bool = False
    running: int = 0  # requests that its engine computes
    waiting: int = 0  # requests that its engine has and did not begin
    drains: dict[str, None] = field(default_factory=dict)

    def report_as(self, replica_id: str, incarnation: str, **fields: Any) -> poll.Report:
        """What it says of itself; `fields`: what its follower adds."""
        report: dict[str, Any] = {
            "version": self.version,
            "world_size": self.world_size,
            "staged_round": self.staged_round,
            "retained_version": self.retained_version,
            "loading_version": self.loading_version,
            "initial": self.initial,
            "store_result": self.store_result,
            "updates_in_place": self.updates_in_place,
            "draining": poll.Draining(drain_ids=tuple(self.drains), running=self.running)
            if self.drains
            else None,
            "adapters": tuple(self.adapters.held),
            "condition": self.condition,
        }
        return poll.Report(replica_id=replica_id, incarnation=incarnation, **report | fields)

    @property
    def begins(self) -> bool:
        """Whether a request that comes now is computed."""
        return not (self.drains or self.held or is_paused(self.condition) or asleep(self.condition))

    # -- instructions -------------------------------------------------------------------------

    def carry_out(self, body: poll.Body) -> Value:
        match body:
            case poll.Receive():
                self._receive(body)
            case poll.Verify():
                return self._verify(body)
            case poll.Commit():
                return self._commit(body)
            case poll.Release():
                self.held = self.held and self.partially_updated
                self._begin_waiting()
            case poll.Drain():
                self.drains[body.drain_id] = None
            case poll.EndDrain():
                self.drains.pop(body.drain_id, None)
                self._begin_waiting()
            case poll.Drop():
                self._discard()
            case poll.CatchUp():
                self._check_unchanged()
                if SleepTag.WEIGHTS in self.memory.asleep:
                    raise RuntimeError("no memory to load into")
                self.version, self.memory.intact, self.held = body.stored.version, True, False
                self._begin_waiting()
            case poll.RunOperation():
                self._call(body)
            case poll.Connect() if not self.updates_in_place:
                self._discard()
            case LoadAdapter():
                if SleepTag.WEIGHTS in self.memory.asleep:
                    raise PayloadRejected("its weights sleep")
                return self.adapters.load(body.adapter)
            case SetAdapters():
                self.adapters.set(list(body.live), set(body.keep))
            case poll.Connect():
                pass
        return None

    @property
    def partially_updated(self) -> bool:
        return self.updates_in_place and self.receiving_round is not None

    def _check_unchanged(self) -> None:
        if self.partially_updated:
            raise RuntimeError("its weights are a mixture of two versions")

    def _discard(self) -> None:
        self._check_unchanged()
        self.staged_round, self.receiving_round, self.verified = None, None, False

    def _receive(self, body: poll.Receive) -> None:
        if SleepTag.WEIGHTS in self.memory.asleep:
            raise PayloadRejected("its weights sleep")
        if self.receiving_round != body.round_id:
            self._discard()
            self.receiving_round, self.staging_intact = body.round_id, True
            self.retaining = body.retain_version if self.retains else None
            if self.updates_in_place:
                self._stop_running(body.in_flight)
                self.held = True
        if self.verified and self.updates_in_place:
            raise RuntimeError("start_weight_update must be called before update_weights")
        self.staged_round, self.verified = body.round_id if self.updates_in_place else None, False

    def _verify(self, body: poll.Verify) -> poll.Staged:
        if self.receiving_round != body.round_id:
            raise PayloadRejected(f"round {body.round_id} has brought no payload")
        if self.verified and self.updates_in_place:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        if self.updates_in_place and SleepTag.WEIGHTS in self.memory.asleep:
            raise RuntimeError("no memory to load into")
        self.staged_round, self.verified = body.round_id, True
        return poll.Staged(
            digest=self.digest,
            checks=(poll.Check.NAMES, poll.Check.FINITE) + ((poll.Check.DIGESTS,) if self.compares else ()),
            drafter=self.drafter,
            size_bytes=10,
            stage_s=0.5,
            verify_s=0.1,
        )

    def _commit(self, body: poll.Commit) -> poll.Swapped:
        if self.version == body.version and self.receiving_round is None:
            return poll.Swapped(swap_s=0.0, gap_s=0.0)  # it came again after a controller restart
        if self.receiving_round != body.round_id or not self.verified:
            raise RuntimeError(f"round {body.round_id} is not verified")
        self.drains.pop(poll.drain_of_round(body.round_id), None)
        if not self.updates_in_place and SleepTag.WEIGHTS in self.memory.asleep:
            raise RuntimeError("no memory to swap into")
        self._stop_running(body.in_flight)
        self.version, self.held = body.version, body.hold
        self.staged_round, self.receiving_round, self.verified = None, None, False
        self.retained_version = self.retaining
        if body.keep is not None and self.retaining is not None and self.writes_at_once:
            self.write(body.keep)
        self.memory.intact = self.staging_intact
        self._begin_waiting()
        return poll.Swapped(swap_s=0.01, gap_s=0.02)

    def _call(self, body: poll.RunOperation) -> None:
        operation = body.operation
        if isinstance(operation, Disconnect) and not (self.updates_in_place and self.verified):
            self._discard()
        self._operate(operation)
        if isinstance(operation, Sleep) and operation.level > 0:
            self.staging_intact = False

    def write(self, wanted: poll.WriteVersion) -> None:
        """An attempt to store what it retains."""
        assert self.retained_version == wanted.version, "told to write what it does not hold"
        path = f"/store/v{wanted.version}"
        self.store_result = poll.StoreResult(
            version=wanted.version, label=wanted.label, path=path, problem=self.store_problem
        )
        if not self.store_problem:
            self.retained_version = None

    # -- requests -----------------------------------------------------------------------------

    def take_requests(self, count: int) -> None:
        self.waiting += count
        self._begin_waiting()

    def end_requests(self) -> None:
        """What runs comes to its end, unless the scheduler stands still."""
        if not (self.held or self.memory.asleep) and (self.drains or not is_paused(self.condition)):
            self.running = 0

    def _begin_waiting(self) -> None:
        if self.begins:
            self.running, self.waiting = self.running + self.waiting, 0

    def _stop_running(self, mode: InFlight) -> None:
        """What a pause of vLLM's scheduler does; with `wait` it would hang as long as requests run."""
        assert mode is not InFlight.WAIT or not self.running, "waits for requests without a deadline"
        if mode is InFlight.ABORT:
            self.running = 0

    def _operate(self, operation: Operation) -> None:
        if isinstance(operation, Pause | Sleep):
            self._stop_running(operation.mode)
        match operation:
            case Sleep():
                self.memory.sleep(operation.level)
            case WakeUp():
                self.memory.wake_up(operation.tags)
            case _:  # none of the others touches memory
                pass
        if isinstance(operation, Pause | Resume | Sleep | WakeUp):
            self.condition = apply(self.condition, operation)
            self._begin_waiting()
