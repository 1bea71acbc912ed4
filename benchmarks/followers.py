"""Replicas without engines, for what the control plane costs: each answers every instruction at once."""

from collections.abc import Iterator
from itertools import count

from deployments.protocol.instructions import Commit, Directive, Instruction, Receive, Verify
from deployments.protocol.reports import Acknowledgement, Outcome, Report, Staged, Swapped, Value

DIGEST = "00"


class Follower:
    """One replica's side of the protocol, without faults."""

    def __init__(self, number: int) -> None:
        self.replica_id = f"replica-{number}"
        self.admitted = False
        self.version = 0
        self._staged_round: int | None = None
        self._reports: Iterator[int] = count(1)
        self._seen = 0  # the newest instruction
        self._acknowledgements: dict[int, Acknowledgement] = {}

    def report(self) -> Report:
        return Report(
            replica_id=self.replica_id,
            incarnation=self.replica_id,
            version=self.version,
            world_size=1,
            staged_round=self._staged_round,
            acknowledgements=tuple(self._acknowledgements.values()),
            number=next(self._reports),
        )

    def take(self, directive: Directive) -> bool:
        """Carry out what is new. Returns whether there is something to report."""
        if directive.fenced is not None:
            raise RuntimeError(f"{self.replica_id} is fenced: {directive.fenced}")
        self.admitted = directive.admitted
        for seq in directive.acknowledged:
            self._acknowledgements.pop(seq, None)
        for instruction in directive.instructions:
            if instruction.seq > self._seen:
                self._seen = instruction.seq
                self._acknowledgements[instruction.seq] = Acknowledgement(
                    seq=instruction.seq, outcome=Outcome.DONE, value=self._carry_out(instruction)
                )
        return bool(self._acknowledgements)

    def _carry_out(self, instruction: Instruction) -> Value:
        match instruction.body:
            case Receive():
                self._staged_round = None
            case Verify(round_id=round_id):
                self._staged_round = round_id
                return Staged(digest=DIGEST, compared=True, size_bytes=1, stage_s=0.0, verify_s=0.0)
            case Commit(version=version):
                self.version, self._staged_round = version, None
                return Swapped(swap_s=0.0, gap_s=0.0)
            case _:
                pass
        return None
