"""The requests of a fake replica: which its engine computes, which wait, and what stops them."""

from dataclasses import dataclass, field

from deployments.protocol.engine_state import (
    EngineState,
    InFlight,
    Operation,
    Pause,
    Resume,
    Sleep,
    WakeUp,
    apply,
    asleep,
    is_paused,
)
from tests.deployments.ledger.fake_memory import Memory


@dataclass(slots=True, kw_only=True, eq=False)
class FakeScheduler:
    """What vLLM's scheduler does at pauses, sleeps, holds and drains."""

    condition: EngineState = ()
    memory: Memory = field(default_factory=Memory)
    held: bool = False
    running: int = 0  # requests that its engine computes
    waiting: int = 0  # requests that its engine has and did not begin
    drains: dict[str, None] = field(default_factory=dict)

    def take_requests(self, count: int) -> None:
        self.waiting += count
        self._begin_waiting()

    def end_requests(self) -> None:
        """What runs comes to its end, unless the scheduler stands still."""
        if not (self.held or self.memory.asleep) and (self.drains or not is_paused(self.condition)):
            self.running = 0

    def _begin_waiting(self) -> None:
        if not (self.drains or self.held or is_paused(self.condition) or asleep(self.condition)):
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
