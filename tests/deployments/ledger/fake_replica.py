"""A replica without an engine: runs instructions at once, or fails as it is told to."""

from dataclasses import dataclass, field
from typing import Any

from deployments.ledger.decisions import Step
from deployments.ledger.desired_state import after
from deployments.protocol import (
    Acknowledgement,
    Directive,
    FleetOperation,
    Instruction,
    InstructionKind,
    Outcome,
    Report,
    StoreResult,
)

PARTS = frozenset({"weights", "kv_cache"})


@dataclass(slots=True)
class Memory:
    """What `Engine` and vLLM do with an engine's memory, and whether the weights in it are a version's."""

    asleep: frozenset[str] = frozenset()
    sound: bool = True
    staged_sound: bool = False  # what the open session has staged

    def sleep(self, level: int) -> None:
        if level == 0 or "weights" in self.asleep:
            return
        self.sound = self.sound and level == 1
        self.staged_sound = False
        self.asleep = PARTS

    def wake_up(self, tags: list[str] | None) -> None:
        self.asleep -= PARTS if tags is None else set(tags)

    def begin(self) -> None:
        self.staged_sound = True

    def swap(self) -> None:
        assert "weights" not in self.asleep, "a swap into memory that is not there ends the engine"
        self.sound = self.staged_sound

    @property
    def computes_noise(self) -> bool:
        return not self.asleep and not self.sound


@dataclass(slots=True, kw_only=True, eq=False)
class FakeReplica:
    replica_id: str
    incarnation: str
    version: int = 0
    world_size: int = 1
    staged_round: int | None = None
    keeps: bool = True  # False: staging 'none', which has nothing to keep
    keeping: int | None = None  # what the open session is to keep
    kept_version: int | None = None
    store_result: StoreResult | None = None
    condition: tuple[Step, ...] = ()
    memory: Memory = field(default_factory=Memory)
    store_problem: str = ""  # why it cannot write to the store
    writes_at_once: bool = True
    admitted: bool = False
    fenced: str | None = None
    held: bool = False
    digest: str = "aa"
    outcomes: dict[InstructionKind, Outcome] = field(default_factory=dict)  # other than DONE
    mute: set[InstructionKind] = field(default_factory=set)  # kinds in which it hangs
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
            kept_version=self.kept_version,
            store_result=self.store_result,
            acknowledgements=tuple(self.acknowledgements.values()),
        )

    def take(self, directive: Directive) -> None:
        for seq in directive.heard:
            self.acknowledgements.pop(seq, None)
        self.fenced = directive.fenced
        self.admitted = directive.admitted and self.fenced is None
        hangs = False
        for instruction in directive.instructions:
            if instruction.seq not in self.seen:
                hangs = hangs or instruction.kind in self.mute
                if not hangs or instruction.kind is InstructionKind.DROP:  # which overtakes
                    self.seen.add(instruction.seq)
                    self._run(instruction)

    def kinds(self) -> list[str]:
        return [instruction.kind.value for instruction in self.ran]

    def _run(self, instruction: Instruction) -> None:
        self.ran.append(instruction)
        outcome = self.outcomes.get(instruction.kind, self._natural_outcome(instruction.kind))
        value = self._effect(instruction) if outcome is Outcome.DONE else None
        message = "" if outcome is Outcome.DONE else f"{outcome.value} here"
        self.acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq, outcome=outcome, message=message, value=value
        )

    def _natural_outcome(self, kind: InstructionKind) -> Outcome:
        if "weights" in self.memory.asleep:
            if kind is InstructionKind.BEGIN:
                return Outcome.REJECTED
            if kind is InstructionKind.CATCH_UP:
                return Outcome.FAILED
        return Outcome.DONE

    def _effect(self, instruction: Instruction) -> Any:
        args = instruction.args
        match instruction.kind:
            case InstructionKind.BEGIN:
                self.keeping = args["keep"] if self.keeps else None
                self.memory.begin()
            case InstructionKind.VERIFY:
                self.staged_round = args["round_id"]
                return {"digest": self.digest, "bytes": 10, "stage_s": 0.5, "verify_s": 0.1}
            case InstructionKind.COMMIT:
                self.version, self.staged_round, self.held = args["version"], None, args["hold"]
                self.kept_version = self.keeping
                self.memory.swap()
                return {"swap_s": 0.01, "gap_s": 0.02}
            case InstructionKind.RELEASE:
                self.held = False
            case InstructionKind.DROP:
                self.staged_round = None
            case InstructionKind.CATCH_UP:
                self.version, self.memory.sound = args["version"], True
            case InstructionKind.STORE if self.writes_at_once:
                self.write(args["version"], args["label"], args["directory"])
            case InstructionKind.FORGET if self.kept_version == args["version"]:
                self.kept_version = None
            case InstructionKind.CALL:
                step = Step(operation=FleetOperation(args["operation"]), arguments=args["arguments"])
                self.condition = after(self.condition, step)
                if step.operation is FleetOperation.SLEEP:
                    self.memory.sleep(step.arguments.get("level", 1))
                elif step.operation is FleetOperation.WAKE_UP:
                    self.memory.wake_up(step.arguments.get("tags"))
                return f"{args['operation']} on {self.replica_id}"
        return None

    def write(self, version: int, label: str | None, directory: str) -> None:
        assert self.kept_version == version, "told to write what it does not hold"
        self.store_result = StoreResult(
            version=version, label=label, path=f"{directory}/v{version}", problem=self.store_problem
        )
