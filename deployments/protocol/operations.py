"""vLLM's RL operations, which the fleet carries out on every replica."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class InFlight(StrEnum):
    """What a pause of the scheduler does with running requests; vLLM's pause modes."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class SleepTag(StrEnum):
    """The parts of an engine that sleep and wake; vLLM's tags."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    name: ClassVar[str] = "pause"
    mode: InFlight = InFlight.ABORT
    clear_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    name: ClassVar[str] = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsPaused:
    name: ClassVar[str] = "is_paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Level 0 only stops scheduling, 1 moves the weights to host memory, 2 discards them."""

    name: ClassVar[str] = "sleep"
    level: int = 1
    mode: InFlight = InFlight.ABORT


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp:
    """`tags` None wakes everything."""

    name: ClassVar[str] = "wake_up"
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
    """`request_ids` empty or None aborts all requests."""

    name: ClassVar[str] = "abort_requests"
    request_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChecksums:
    """The checksums of vLLM's `/weight_checker`."""

    name: ClassVar[str] = "weight_checker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """vLLM's `shutdown_weight_transfer_engine`."""

    name: ClassVar[str] = "disconnect"


LastingOperation = Pause | Resume | Sleep | WakeUp  # their effect outlasts the call
Operation = (
    LastingOperation | IsPaused | IsSleeping | ResetPrefixCache | AbortRequests | WeightChecksums | Disconnect
)
