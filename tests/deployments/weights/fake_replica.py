"""A replica without an engine: runs instructions at once, or fails as it is told to."""

from dataclasses import dataclass, field
from typing import Any

from deployments.weights.decisions import Step
from deployments.weights.operations import after
from deployments.weights.protocol import (
    Acknowledgement,
    Directive,
    FleetOperation,
    Instruction,
    InstructionKind,
    Outcome,
    Report,
    StoreResult,
)


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
    store_problem: str = ""  # why it cannot write to the store
    writes_at_once: bool = True
    admitted: bool = False
    fenced: str | None = None
    held: bool = False
    digest: str = "aa"
    outcomes: dict[InstructionKind, Outcome] = field(default_factory=dict)  # other than DONE
    mute: set[InstructionKind] = field(default_factory=set)  # kinds that it never answers
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
        for instruction in directive.instructions:
            if instruction.seq not in self.seen and instruction.kind not in self.mute:
                self.seen.add(instruction.seq)
                self._run(instruction)

    def kinds(self) -> list[str]:
        return [instruction.kind.value for instruction in self.ran]

    def _run(self, instruction: Instruction) -> None:
        self.ran.append(instruction)
        outcome = self.outcomes.get(instruction.kind, Outcome.DONE)
        value = self._effect(instruction) if outcome is Outcome.DONE else None
        message = "" if outcome is Outcome.DONE else f"{outcome.value} here"
        self.acknowledgements[instruction.seq] = Acknowledgement(
            seq=instruction.seq, outcome=outcome, message=message, value=value
        )

    def _effect(self, instruction: Instruction) -> Any:
        args = instruction.args
        match instruction.kind:
            case InstructionKind.BEGIN:
                self.keeping = args["keep"] if self.keeps else None
            case InstructionKind.VERIFY:
                self.staged_round = args["round_id"]
                return {"digest": self.digest, "bytes": 10, "stage_s": 0.5, "verify_s": 0.1}
            case InstructionKind.COMMIT:
                self.version, self.staged_round, self.held = args["version"], None, args["hold"]
                self.kept_version = self.keeping
                return {"swap_s": 0.01, "gap_s": 0.02}
            case InstructionKind.RELEASE:
                self.held = False
            case InstructionKind.DROP:
                self.staged_round = None
            case InstructionKind.CATCH_UP:
                self.version = args["version"]
            case InstructionKind.STORE if self.writes_at_once:
                self.write(args["version"], args["label"], args["directory"])
            case InstructionKind.FORGET if self.kept_version == args["version"]:
                self.kept_version = None
            case InstructionKind.CALL:
                step = Step(operation=FleetOperation(args["operation"]), arguments=args["arguments"])
                self.condition = after(self.condition, step)
                return f"{args['operation']} on {self.replica_id}"
        return None

    def write(self, version: int, label: str | None, directory: str) -> None:
        assert self.kept_version == version, "told to write what it does not hold"
        self.store_result = StoreResult(
            version=version, label=label, path=f"{directory}/v{version}", problem=self.store_problem
        )
