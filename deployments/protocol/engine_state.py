"""The condition of an engine or a fleet: paused or not, which parts sleep, whether the weights are intact.

A condition is the shortest sequence of lasting operations that leads a fresh engine there, so a replica that
joins later reaches it by carrying them out in order.

    sleep(level=2) ─► wake_up(weights) ─► a committed round ─► wake_up(kv_cache)
           weights discarded                weights intact: the sleep counts as level 1 from here on
"""

from collections.abc import Iterable
from dataclasses import replace

from deployments.protocol.operations import LastingOperation, Pause, Resume, Sleep, SleepTag, WakeUp

Condition = tuple[LastingOperation, ...]

MEMORY_TAGS = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})  # what a sleep at level 1 or 2 gives back


def apply(condition: Condition, operation: LastingOperation) -> Condition:
    """The condition after an operation."""
    match operation:
        case Pause():
            return (*_without(condition, Pause), operation)
        case Resume():
            return _without(condition, Pause)
        case Sleep():
            if operation.level == 0 and asleep(condition):
                return condition  # memory that sleeps stays asleep
            if discarded(condition):  # and weights that are gone stay gone at any level
                operation = replace(operation, level=2)
            return (*_without(condition, Sleep, WakeUp), operation)
        case WakeUp():
            longer = (*condition, operation)
            # vLLM resumes the scheduler with the last part that wakes, whoever paused it.
            return longer if asleep(longer) else _without(longer, Pause, Sleep, WakeUp)


def path_to(wanted: Condition, current: Condition) -> Condition:
    """The operations that lead from the current condition to the wanted one."""
    if wanted[: len(current)] == current:
        return wanted[len(current) :]
    wake = (WakeUp(),) if asleep(current) else ()
    resume = (Resume(),) if is_paused(current) else ()
    return (*wake, *resume, *wanted)


def equivalent(one: Condition, other: Condition) -> bool:
    """Whether an engine computes in the one what it computes in the other, with weights that are intact."""
    return one == other or (is_paused(one) == is_paused(other) and asleep(one) == asleep(other))


def is_paused(condition: Condition) -> bool:
    """Whether a user paused it."""
    return any(isinstance(operation, Pause) for operation in condition)


def asleep(condition: Condition) -> frozenset[SleepTag]:
    """The parts that sleep: weights, KV cache, or at level 0 only the scheduling."""
    tags: frozenset[SleepTag] = frozenset()
    for operation in condition:
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


def discarded(condition: Condition) -> bool:
    """Whether the weights were discarded and no round has replaced them."""
    return any(isinstance(operation, Sleep) and operation.level > 1 for operation in condition)


def intact(condition: Condition) -> Condition:
    """The same condition after a round replaced discarded weights."""
    return tuple(
        replace(each, level=1) if isinstance(each, Sleep) and each.level > 1 else each for each in condition
    )


def _without(condition: Iterable[LastingOperation], *kinds: type[LastingOperation]) -> Condition:
    return tuple(operation for operation in condition if not isinstance(operation, kinds))
