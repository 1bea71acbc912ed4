"""A replica without an engine: runs instructions at once, and fails where a real engine fails."""

from dataclasses import dataclass, field

from deployments.protocol.adapters import DropAdapter, LoadAdapter, ReceiveAdapter, SetAdapters
from deployments.protocol.engine_state import Disconnect, Sleep, SleepTag
from deployments.protocol.poll import (
    Acknowledgement,
    Body,
    CatchUp,
    Check,
    Commit,
    Connect,
    Directive,
    Drain,
    Draining,
    Drop,
    EndDrain,
    Forget,
    Instruction,
    Outcome,
    Receive,
    Release,
    Report,
    RunOperation,
    Staged,
    StoreResult,
    Swapped,
    Verify,
    WriteVersion,
    drain_of_round,
)
from tests.deployments.ledger.fake_adapters import FakeAdapters, NotHeld
from tests.deployments.ledger.fake_scheduler import FakeScheduler

Value = Staged | Swapped | str | None


class Failure(Exception):
    """What a real engine answers instead of carrying an instruction out."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(slots=True, kw_only=True, eq=False)
class FakeReplica(FakeScheduler):
    """Implements the replica's side of the protocol; faults are injected by instruction class."""

    replica_id: str
    incarnation: str
    version: int = 0
    world_size: int = 1
    missing_ranks: tuple[int, ...] = ()  # what it says of a transfer that failed
    staged_round: int | None = None
    receiving_round: int | None = None  # whose payloads are staged, complete or not
    verified: bool = False  # what it received is complete
    failed: str = ""  # how; its weights may be a mixture: it takes no request until it is fenced
    staging_intact: bool = False  # no sleep has discarded what the session staged
    retains: bool = True  # False: staging 'none', which has nothing to retain
    retaining: int | None = None  # what the open session is to retain
    retained_version: int | None = None
    store_result: StoreResult | None = None
    adapters: FakeAdapters = field(default_factory=FakeAdapters)
    store_problem: str = ""  # why it cannot write to the store
    writes_at_once: bool = True
    admitted: bool = False
    fenced: str | None = None
    updates_in_place: bool = False
    leaving: bool = False
    drained: bool = False
    ended: bool = False
    may_leave: bool = False
    wanted: int | None = None
    digest: str = "aa"
    compares: bool = True  # False: its publisher states no digests
    by_name: bool = False  # its digest is of what arrived, by checkpoint name, also without stated ones
    outcomes: dict[type[Body], Outcome] = field(default_factory=dict)  # other than DONE
    hangs_in: set[type[Body]] = field(default_factory=set)
    loading_version: int | None = None
    reports: int = 0
    ran: list[Instruction] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    acknowledgements: dict[int, Acknowledgement] = field(default_factory=dict)

    def report(self) -> Report:
        self.reports += 1
        return Report(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            version=self.version,
            world_size=self.world_size,
            staged_round=self.staged_round,
            retained_version=self.retained_version,
            loading_version=self.loading_version,
            store_result=self.store_result,
            updates_in_place=self.updates_in_place,
            draining=Draining(drain_ids=tuple(self.drains), running=self.running) if self.drains else None,
            adapters=self.adapters.state(),
            condition=self.condition,
            acknowledgements=tuple(self.acknowledgements.values()),
            number=self.reports,
            failed=self.failed,
            fenced=self.fenced is not None,
            leaving=self.leaving,
            drained=self.drained,
            ended=self.ended,
        )

    def take(self, directive: Directive) -> None:
        if self.fenced is not None:
            return  # for good
        for seq in directive.acknowledged:
            self.acknowledgements.pop(seq, None)
        self.fenced = directive.fenced
        self.admitted = directive.admitted and self.fenced is None and not self.failed
        self.may_leave, self.wanted = directive.may_leave, directive.desired.wanted
        hangs = False
        if self.fenced is not None:
            return
        for instruction in directive.instructions:
            if instruction.seq not in self.seen:
                hangs = hangs or type(instruction.body) in self.hangs_in
                if hangs and isinstance(instruction.body, CatchUp):
                    self.loading_version = instruction.body.version
                if not hangs or isinstance(instruction.body, Drop):  # which overtakes
                    self.seen.add(instruction.seq)
                    self._run(instruction)

    def names(self) -> list[str]:
        """Of the instructions that it ran."""
        return [instruction.body.name for instruction in self.ran]

    def _run(self, instruction: Instruction) -> None:
        self.ran.append(instruction)
        value: Value = None
        outcome, message = Outcome.DONE, ""
        if isinstance(instruction.body, CatchUp):
            self.loading_version = None
        injected = self.outcomes.get(type(instruction.body), Outcome.DONE)
        if injected is not Outcome.DONE:
            outcome, message = injected, f"{injected.value} here"
        else:
            try:
                value = self._carry_out(instruction.body)
            except Failure as failure:
                outcome, message = failure.outcome, str(failure)
        changes_weights = isinstance(instruction.body, Commit | CatchUp) or self.partially_updated
        if outcome is Outcome.REPLICA_FAILED and changes_weights:
            self.failed, self.admitted = f"{instruction.body.name}: {message}", False
        self.acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq,
            outcome=outcome,
            message=message,
            value=value,
            missing_ranks=self.missing_ranks if outcome is Outcome.TRANSFER_FAILED else (),
        )

    def _carry_out(self, body: Body) -> Value:
        match body:
            case Receive():
                self._receive(body)
            case Verify():
                return self._verify(body)
            case Commit():
                return self._commit(body)
            case Release():
                self.held = self.held and self.partially_updated
                self._begin_waiting()
            case Drain():
                self.drains[body.drain_id] = None
            case EndDrain():
                self.drains.pop(body.drain_id, None)
                self._begin_waiting()
            case Drop():
                self._discard()
            case CatchUp():
                self._check_unchanged()
                if SleepTag.WEIGHTS in self.memory.asleep:
                    raise Failure(Outcome.REPLICA_FAILED, "no memory to load into")
                self.version, self.memory.intact, self.held = body.version, True, False
                self._begin_waiting()
            case WriteVersion():
                self.store_result = None
                if self.retained_version != body.version:
                    raise Failure(Outcome.REPLICA_FAILED, f"retains {self.retained_version}")
                if self.writes_at_once:
                    self.write(body.version, body.label, body.directory)
            case Forget() if self.retained_version is not None and self.retained_version <= body.version:
                self.retained_version = None
            case RunOperation():
                return self._call(body)
            case Connect() if not self.updates_in_place:
                self._discard()
            case ReceiveAdapter():
                if self.updates_in_place:
                    raise Failure(Outcome.REJECTED, "vLLM's own engines receive no adapters")
                self._discard()
                self.adapters.arrived = body.load_id
            case LoadAdapter():
                if SleepTag.WEIGHTS in self.memory.asleep:
                    raise Failure(Outcome.REJECTED, "its weights sleep")
                return self.adapters.load(body.adapter)
            case SetAdapters():
                try:
                    self.adapters.set(list(body.live))
                except NotHeld as error:
                    raise Failure(Outcome.REPLICA_FAILED, str(error)) from error
            case DropAdapter():
                self.adapters.drop(body.adapter_id)
            case Connect() | Forget():
                pass
        return None

    @property
    def partially_updated(self) -> bool:
        return self.updates_in_place and self.receiving_round is not None

    def _check_unchanged(self) -> None:
        if self.partially_updated:
            raise Failure(Outcome.REPLICA_FAILED, "its weights are a mixture of two versions")

    def _discard(self) -> None:
        self._check_unchanged()
        self.staged_round, self.receiving_round, self.verified = None, None, False

    def _receive(self, body: Receive) -> None:
        if SleepTag.WEIGHTS in self.memory.asleep:
            raise Failure(Outcome.REJECTED, "its weights sleep")
        if self.receiving_round != body.round_id:
            self._discard()
            self.receiving_round, self.staging_intact = body.round_id, True
            self.retaining = body.options.retain_version if self.retains else None
            if self.updates_in_place:
                self._stop_running(body.options.in_flight)
                self.held = True
        if self.verified and self.updates_in_place:
            raise Failure(Outcome.REPLICA_FAILED, "start_weight_update must be called before update_weights")
        self.staged_round, self.verified = body.round_id if self.updates_in_place else None, False

    def _verify(self, body: Verify) -> Staged:
        if self.receiving_round != body.round_id:
            raise Failure(Outcome.REJECTED, f"round {body.round_id} has brought no payload")
        if self.verified and self.updates_in_place:
            raise Failure(Outcome.REPLICA_FAILED, "finish_weight_update called without start_weight_update")
        if self.updates_in_place and SleepTag.WEIGHTS in self.memory.asleep:
            raise Failure(Outcome.REPLICA_FAILED, "no memory to load into")
        self.staged_round, self.verified = body.round_id, True
        return Staged(
            digest=self.digest,
            compared=self.compares,
            checks=(Check.NAMES, Check.FINITE) + ((Check.DIGESTS,) if self.compares else ()),
            by_name=self.by_name,
            size_bytes=10,
            stage_s=0.5,
            verify_s=0.1,
        )

    def _commit(self, body: Commit) -> Swapped:
        if self.version == body.version and self.receiving_round is None:
            return Swapped(swap_s=0.0, gap_s=0.0)  # it came again after a controller restart
        if self.receiving_round != body.round_id or not self.verified:
            raise Failure(Outcome.REPLICA_FAILED, f"round {body.round_id} is not verified")
        if not self.updates_in_place and SleepTag.WEIGHTS in self.memory.asleep:
            raise Failure(Outcome.REPLICA_FAILED, "no memory to swap into")
        self._stop_running(body.in_flight)
        self.drains.pop(drain_of_round(body.round_id), None)
        self.version, self.held = body.version, body.hold
        self.staged_round, self.receiving_round, self.verified = None, None, False
        self.retained_version = self.retaining
        self.memory.intact = self.staging_intact
        self._begin_waiting()
        return Swapped(swap_s=0.01, gap_s=0.02)

    def _call(self, body: RunOperation) -> str:
        operation = body.operation
        if isinstance(operation, Disconnect) and not (self.updates_in_place and self.verified):
            self._discard()
        self._operate(operation)
        if isinstance(operation, Sleep) and operation.level > 0:
            self.staging_intact = False
        return f"{operation.name} on {self.replica_id}"

    def write(self, version: int, label: str | None, directory: str) -> None:
        assert self.retained_version == version, "told to write what it does not hold"
        self.store_result = StoreResult(
            version=version, label=label, path=f"{directory}/v{version}", problem=self.store_problem
        )
