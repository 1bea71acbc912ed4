"""vLLM's RL operations, and the engine state that they lead to: paused, asleep, weights intact.

A state is the shortest sequence of lasting operations that takes a fresh engine there: a late joiner runs
them in order.

    sleep(level=2) ─► wake_up(weights) ─► a committed round ─► wake_up(kv_cache)
           weights discarded                weights intact: the sleep counts as level 1 from here on
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Literal


class InFlight(StrEnum):
    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class SleepTag(StrEnum):
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    name: Literal["pause"] = "pause"
    mode: InFlight = InFlight.ABORT
    clear_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    name: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsPaused:
    name: ClassVar[str] = "is_paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Level 0 only stops scheduling, 1 moves the weights to host memory, 2 discards them."""

    name: Literal["sleep"] = "sleep"
    level: int = 1
    mode: InFlight = InFlight.ABORT


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """`tags` None wakes everything."""

    name: Literal["wake_up"] = "wake_up"
    tags: tuple[SleepTag, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IsSleeping:
    name: ClassVar[str] = "is_sleeping"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    name: ClassVar[str] = "reset_prefix_cache"
    reset_running_requests: bool = False
    reset_connector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    name: ClassVar[str] = "abort_requests"
    request_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChecksums:
    name: ClassVar[str] = "weight_checker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    name: ClassVar[str] = "disconnect"


LastingOperation = Pause | Resume | Sleep | WakeUp  # their effect outlasts the call
Operation = (
    LastingOperation | IsPaused | IsSleeping | ResetPrefixCache | AbortRequests | WeightChecksums | Disconnect
)
EngineState = tuple[LastingOperation, ...]

MEMORY_TAGS = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})  # what sleep levels 1 and 2 free


def apply(state: EngineState, operation: LastingOperation) -> EngineState:
    match operation:
        case Pause():
            return (*_without(state, Pause), operation)
        case Resume():
            return _without(state, Pause)
        case Sleep():
            if operation.level == 0 and asleep(state):
                return state
            if discarded(state):
                operation = replace(operation, level=2)
            return (*_without(state, Sleep, WakeUp), operation)
        case WakeUp():
            longer = (*state, operation)
            # vLLM resumes the scheduler when the last part wakes, even if a user paused it.
            return longer if asleep(longer) else _without(longer, Pause, Sleep, WakeUp)


def path_to(wanted: EngineState, current: EngineState) -> EngineState:
    if wanted[: len(current)] == current:
        return wanted[len(current) :]
    wake = (WakeUp(),) if asleep(current) else ()
    resume = (Resume(),) if is_paused(current) else ()
    return (*wake, *resume, *wanted)


def equivalent(one: EngineState, other: EngineState) -> bool:
    return one == other or (is_paused(one) == is_paused(other) and asleep(one) == asleep(other))


def is_paused(state: EngineState) -> bool:
    return any(isinstance(operation, Pause) for operation in state)


def asleep(state: EngineState) -> frozenset[SleepTag]:
    """The parts that sleep: weights, KV cache, or at level 0 only the scheduling."""
    tags: frozenset[SleepTag] = frozenset()
    for operation in state:
        match operation:
            case Sleep(level=0):
                tags = frozenset({SleepTag.SCHEDULING})
            case Sleep():
                tags = MEMORY_TAGS
            case WakeUp():
                # At level 0 there is no memory to wake: any tag resumes.
                everything = operation.tags is None or SleepTag.SCHEDULING in tags
                tags = frozenset() if everything else tags - frozenset(operation.tags or ())
            case _:
                pass
    return tags


def discarded(state: EngineState) -> bool:
    return any(isinstance(operation, Sleep) and operation.level > 1 for operation in state)


def intact(state: EngineState) -> EngineState:
    return tuple(
        replace(each, level=1) if isinstance(each, Sleep) and each.level > 1 else each for each in state
    )


def _without(state: EngineState, *kinds: type[LastingOperation]) -> EngineState:
    return tuple(operation for operation in state if not isinstance(operation, kinds))
