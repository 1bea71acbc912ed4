"""What sleeping does to a fake replica's weights."""

from dataclasses import dataclass

from deployments.protocol.engine_state import MEMORY_TAGS, SleepTag


@dataclass(slots=True)
class Memory:
    """The memory of a `ReplicaEngine`, and whether the weights in it are a version's."""

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
