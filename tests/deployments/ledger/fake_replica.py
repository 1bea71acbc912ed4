"""A replica without an engine: runs instructions at once, and fails where a real engine fails."""

from dataclasses import dataclass, field

from deployments.condition import MEMORY_TAGS, Condition, apply
from deployments.protocol.instructions import (
    Body,
    Call,
    CatchUp,
    Commit,
    Connect,
    Directive,
    Drop,
    Forget,
    Instruction,
    Receive,
    Release,
    Verify,
    WriteVersion,
)
from deployments.protocol.operations import Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.protocol.reports import Acknowledgement, Outcome, Report, Staged, StoreResult, Swapped

Value = Staged | Swapped | str | None


class Failure(Exception):
    """What a real engine answers instead of carrying an instruction out."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(slots=True)
class Memory:
    """What `Engine` and vLLM do with an engine's memory, and whether the weights in it are a version's."""

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
class FakeReplica:
    """Implements the replica's side of the protocol; faults are injected by instruction class."""

    replica_id: str
    incarnation: str
    version: int = 0
    world_size: int = 1
    staged_round: int | None = None
    receiving_round: int | None = None  # whose payloads are staged, complete or not
    staging_intact: bool = False  # no sleep has discarded what the session staged
    retains: bool = True  # False: staging 'none', which has nothing to retain
    retaining: int | None = None  # what the open session is to retain
    retained_version: int | None = None
    store_result: StoreResult | None = None
    condition: Condition = ()
    memory: Memory = field(default_factory=Memory)
    store_problem: str = ""  # why it cannot write to the store
    writes_at_once: bool = True
    admitted: bool = False
    fenced: str | None = None
    held: bool = False
    digest: str = "aa"
    compares: bool = True  # False: its publisher states no digests
    outcomes: dict[type[Body], Outcome] = field(default_factory=dict)  # other than DONE
    hangs_in: set[type[Body]] = field(default_factory=set)
    ran: list[Instruction] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    acknowledgements: dict[int, Acknowledgement] = field(default_factory=dict)

    def report(self) -> Report:
        return Report(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            version=self.version,
            world_size=self.world_size,
            staged_round=self.staged_round,
            retained_version=self.retained_version,
            store_result=self.store_result,
            acknowledgements=tuple(self.acknowledgements.values()),
        )

    def take(self, directive: Directive) -> None:
        for seq in directive.acknowledged:
            self.acknowledgements.pop(seq, None)
        self.fenced = directive.fenced
        self.admitted = directive.admitted and self.fenced is None
        hangs = False
        for instruction in directive.instructions:
            if instruction.seq not in self.seen:
                hangs = hangs or type(instruction.body) in self.hangs_in
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
        injected = self.outcomes.get(type(instruction.body), Outcome.DONE)
        if injected is not Outcome.DONE:
            outcome, message = injected, f"{injected.value} here"
        else:
            try:
                value = self._carry_out(instruction.body)
            except Failure as failure:
                outcome, message = failure.outcome, str(failure)
        self.acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq, outcome=outcome, message=message, value=value
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
                self.held = False
            case Drop():
                self.staged_round = self.receiving_round = None
            case CatchUp():
                if SleepTag.WEIGHTS in self.memory.asleep:
                    raise Failure(Outcome.REPLICA_FAILED, "no memory to load into")
                self.version, self.memory.intact = body.version, True
            case WriteVersion():
                if self.retained_version != body.version:
                    raise Failure(Outcome.REPLICA_FAILED, f"retains {self.retained_version}")
                if self.writes_at_once:
                    self.write(body.version, body.label, body.directory)
            case Forget() if self.retained_version == body.version:
                self.retained_version = None
            case Call():
                return self._call(body)
            case Connect() | Forget():
                pass
        return None

    def _receive(self, body: Receive) -> None:
        if SleepTag.WEIGHTS in self.memory.asleep:
            raise Failure(Outcome.REJECTED, "its weights sleep")
        if self.receiving_round != body.round_id:
            self.receiving_round, self.staging_intact = body.round_id, True
            self.retaining = body.options.retain_version if self.retains else None

    def _verify(self, body: Verify) -> Staged:
        if self.receiving_round != body.round_id:
            raise Failure(Outcome.REJECTED, f"round {body.round_id} has brought no payload")
        self.staged_round = body.round_id
        return Staged(digest=self.digest, compared=self.compares, size_bytes=10, stage_s=0.5, verify_s=0.1)

    def _commit(self, body: Commit) -> Swapped:
        if self.version == body.version and self.receiving_round is None:
            return Swapped(swap_s=0.0, gap_s=0.0)  # it came again after a controller restart
        if self.receiving_round != body.round_id:
            raise Failure(Outcome.REPLICA_FAILED, "finish_weight_update called without start_weight_update")
        if SleepTag.WEIGHTS in self.memory.asleep:
            raise Failure(Outcome.REPLICA_FAILED, "no memory to swap into")
        self.version, self.held = body.version, body.hold
        self.staged_round = self.receiving_round = None
        self.retained_version = self.retaining
        self.memory.intact = self.staging_intact
        return Swapped(swap_s=0.01, gap_s=0.02)

    def _call(self, body: Call) -> str:
        operation = body.operation
        match operation:
            case Sleep():
                self.memory.sleep(operation.level)
                if operation.level > 0:
                    self.staging_intact = False
            case WakeUp():
                self.memory.wake_up(operation.tags)
            case _:  # none of the others touches memory
                pass
        if isinstance(operation, Pause | Resume | Sleep | WakeUp):
            self.condition = apply(self.condition, operation)
        return f"{operation.name} on {self.replica_id}"

    def write(self, version: int, label: str | None, directory: str) -> None:
        assert self.retained_version == version, "told to write what it does not hold"
        self.store_result = StoreResult(
            version=version, label=label, path=f"{directory}/v{version}", problem=self.store_problem
        )
