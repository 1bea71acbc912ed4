"""The faults of a schedule, drawn from its seed: what, when or with which message, and for how long."""

from collections.abc import Callable
from random import Random

from tests.simulation.loop import Process
from tests.simulation.situations import SITUATIONS
from tests.simulation.world import World

WINDOW_S = 8.0  # faults begin within it
CALM_S = 9.0  # and have ended by then
FIRST_MESSAGES = 500
SITUATION = 0.4  # of the schedules


class Faults:
    """Plans the faults of a world, and ends them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = Random(f"{world.seed} faults")
        self._ends: list[Callable[[], None]] = []

    def plan(self, situation: str | None = None) -> float:
        """A situation, or faults of many kinds; returns when they are over, in seconds.

        Args:
            situation: this one; otherwise it is drawn whether there is one, and which.
        """
        drawn = Random(f"{self._world.seed} situation")
        if situation is None and drawn.random() < SITUATION:
            situation = drawn.choice(sorted(SITUATIONS))
        if situation is None:
            self._plan_many()
            return CALM_S
        self._world.log("situation: {}", situation)
        calm_s = SITUATIONS[situation](self._world, drawn)
        self._world.loop.call_at(calm_s, self.end)
        return calm_s

    def _plan_many(self) -> None:
        """Faults in the network for the whole window, others at a time or at a message."""
        rng, world = self._rng, self._world
        if rng.random() < 0.5:
            network = world.network
            network.lose = rng.choice([0.0, 0.0, 0.01, 0.1])
            network.double = rng.choice([0.0, 0.0, 0.02, 0.2])
            network.late = rng.choice([0.0, 0.0, 0.02, 0.1])
        if rng.random() < 0.3:
            world.work.fail = rng.choice([0.0, 0.02, 0.1])
            world.work.hang = rng.choice([0.0, 0.0, 0.05])
            world.work.slow = rng.choice([0.0, 0.05, 0.3])
            world.work.flip = rng.choice([0.0, 0.0, 0.1])
            world.damaged = world.work.flip > 0
        kinds = [
            self._kill_replica,
            self._kill_replica,
            self._stop_replica,
            self._stop_replica,
            self._cut_replica,
            self._kill_controller,
            self._kill_controller,
            self._stop_controller,
            self._cut_replica,
            self._cut_controller,
            self._kill_publisher,
            self._stop_publisher,
            self._full_disk,
            self._slow_disk,
            self._broken_disk,
            self._hung_engine,
            self._dead_engine,
            self._ray_hangs,
            self._lose_power,
            self._lose_a_stored_version,
        ]
        for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 6])):
            fault = rng.choice(kinds)
            if rng.random() < 0.6:
                begin = self._once(fault)
                world.network.at_message[rng.randint(1, FIRST_MESSAGES)] = lambda begin=begin: (
                    world.loop.outside(begin)
                )
            else:
                world.loop.call_at(rng.random() * WINDOW_S, self._once(fault))
        world.loop.call_at(CALM_S, self.end)

    def end(self) -> None:
        """From here on nothing goes wrong any more."""
        world = self._world
        world.network.at_message.clear()
        world.network.lose = world.network.double = world.network.late = 0.0
        world.work.fail = world.work.hang = world.work.slow = world.work.flip = 0.0
        ends, self._ends = self._ends, []
        for each in ends:
            each()
        world.log("the faults have ended")

    def _once(self, fault: Callable[[], None]) -> Callable[[], None]:
        def begin() -> None:
            if self._world.loop.now < CALM_S:
                fault()

        return begin

    def _for_a_while(self, end: Callable[[], None], longest_s: float = 9.0) -> None:
        """End it after a time, or when all faults end."""
        self._ends.append(end)
        self._world.loop.call_later(
            self._rng.choice([0.5, 3.0, 6.0, longest_s]) * (0.5 + 0.5 * self._rng.random()), end
        )

    def _any_replica(self) -> Process:
        return self._rng.choice([each.process for each in self._world.replicas.values()] or [Process("none")])

    # -- processes ----------------------------------------------------------------------------

    def _kill_replica(self) -> None:
        process = self._any_replica()
        if process.alive:
            self._world.kill(process)

    def _stop_replica(self) -> None:
        self._stop(self._any_replica())

    def _kill_controller(self) -> None:
        process = self._world.controller_process
        if process is not None and process.alive:
            self._world.kill(process)

    def _stop_controller(self) -> None:
        if self._world.controller_process is not None:
            self._stop(self._world.controller_process)

    def _kill_publisher(self) -> None:
        process = self._world.publisher
        if process is not None and process.alive:
            self._world.kill(process)

    def _stop_publisher(self) -> None:
        if self._world.publisher is not None:
            self._stop(self._world.publisher)

    def _stop(self, process: Process) -> None:
        if process.runs:
            self._world.stop(process)
            self._for_a_while(lambda: self._world.go_on(process))

    # -- the network --------------------------------------------------------------------------

    def _cut_replica(self) -> None:
        self._cut(self._any_replica().name)

    def _cut_controller(self) -> None:
        if self._world.controller_process is not None:
            self._cut(self._world.controller_process.name)

    def _cut(self, name: str) -> None:
        world = self._world
        world.log("{} is cut off", name)
        world.network.cut.add(name)
        self._for_a_while(lambda: world.network.cut.discard(name))

    # -- the disk -----------------------------------------------------------------------------

    def _full_disk(self) -> None:
        disk = self._world.disk
        self._world.log("the disk is full")
        disk.full = True
        self._for_a_while(lambda: setattr(disk, "full", False))

    def _slow_disk(self) -> None:
        disk, rng = self._world.disk, Random(f"{self._world.seed} slow")
        worst_s = self._rng.choice([0.1, 1.0, 8.0])
        self._world.log("the disk is slow: up to {} s", worst_s)
        disk.latency_s = lambda: rng.random() * worst_s
        self._for_a_while(lambda: setattr(disk, "latency_s", lambda: 0.001))

    def _broken_disk(self) -> None:
        disk = self._world.disk
        self._world.log("the disk is broken")
        disk.broken = True
        self._for_a_while(lambda: setattr(disk, "broken", False), 3.0)

    def _lose_power(self) -> None:
        """The controller's host: its process is gone, and what was not synced."""
        self._kill_controller()
        self._world.disk.lose_power()

    def _lose_a_stored_version(self) -> None:
        """Somebody removes a directory of the store."""
        world = self._world
        paths = sorted(world.stored)
        if paths and world.store_dir is not None:
            path = self._rng.choice(paths)
            world.log("{} is removed from the store", path.rsplit("/", 1)[1])
            world.remove_stored(path)

    # -- others -------------------------------------------------------------------------------

    def _hung_engine(self) -> None:
        chosen = self._world.started_replica(self._rng)
        if chosen is not None and chosen.member is not None:
            self._world.log("the engine of {} hangs", chosen.name)
            chosen.member.hangs = True

    def _dead_engine(self) -> None:
        chosen = self._world.started_replica(self._rng)
        if chosen is not None:
            chosen.lose_engine()

    def _ray_hangs(self) -> None:
        world = self._world
        world.lookups_hang = True
        self._for_a_while(lambda: setattr(world, "lookups_hang", False))
