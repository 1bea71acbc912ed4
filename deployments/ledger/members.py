"""One replica as the ledger knows it: its state, what it was told, and what it has still to do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.errors import SlipstreamError
from deployments.ledger.decisions import Step
from deployments.protocol import Acknowledgement, Instruction, InstructionKind


class MemberState(StrEnum):
    RETURNING = "returning"  # a member before the controller restarted; not heard of since
    JOINING = "joining"  # alive, takes no requests yet
    SERVING = "serving"
    FENCED = "fenced"  # never serves again; not gone yet
    LOST = "lost"  # gone


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    replica_id: str
    incarnation: str
    world_size: int
    version: int
    state: MemberState
    seen: float  # when it last polled
    reason: str = ""  # why it is fenced or lost
    orders: list["Order"] = field(default_factory=list)  # in order, not acknowledged yet
    told: tuple[Any, ...] | None = None  # what the last directive said
    was_serving: bool = False  # before the controller restarted
    condition: tuple[Step, ...] = ()  # what was done to it that lasts, see `operations`
    kept_version: int | None = None  # its tensors wait there for the store
    fence_told: bool = False  # it knows that it is fenced; until then it may still take a request

    @property
    def alive(self) -> bool:
        return self.state in (MemberState.JOINING, MemberState.SERVING)

    @property
    def out(self) -> bool:
        return self.state in (MemberState.FENCED, MemberState.LOST)

    def has_order(self, kind: InstructionKind) -> bool:
        return any(order.instruction.kind is kind for order in self.orders)


Then = Callable[["Task", float], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """An errand that several members run: done when each has answered, or is out.

    `certain`: a fenced member counts only once it has been told, or is lost; until then it might
    still take a request.
    """

    kind: str
    waiting: set[Member] = field(default_factory=set)
    then: Then | None = None
    certain: bool = False
    round_id: int | None = None
    answers: dict[str, Acknowledgement] = field(default_factory=dict)  # by replica id
    absent: dict[str, str] = field(default_factory=dict)  # replica id -> why it did not answer
    done: bool = False
    error: SlipstreamError | None = None
    result: Any = None

    def finish(self, result: Any = None, error: SlipstreamError | None = None) -> None:
        if not self.done:
            self.done, self.result, self.error = True, result, error


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """An instruction on its way to one member. Its clock runs while it is the first in the queue."""

    instruction: Instruction
    task: Task | None
    due: float | None = None
    delivered: bool = False
