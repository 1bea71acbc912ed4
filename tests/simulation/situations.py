"""Situations that faults drawn one by one seldom come to: one of them is a whole schedule.

Nothing else goes wrong in it, so more can be asked of the fleet than that it is right and recovers: that no
replica is lost which did nothing wrong, or that the others go on without the one that is away.
"""

from collections.abc import Callable
from random import Random

from deployments.protocol.instructions import Body, Receive, Verify
from tests.simulation.oracle import Violation
from tests.simulation.world import World

WINDOW_S = 8.0
AWAY_S = 20.0  # longer than a deadline, the heartbeat and a round together
Situation = Callable[[World, Random], float]  # plans it; when it is over, in seconds


def controller_dies(world: World, rng: Random) -> float:
    """In any phase of a round, up to three times. The replicas and the publisher live: none may be lost."""
    world.innocent = True
    power = rng.random() < 0.3

    def die() -> None:
        process = world.controller_process
        if process is not None and process.alive and world.loop.now < WINDOW_S:
            world.kill(process)
            if power:
                world.disk.lose_power()

    def at_message(number: int) -> None:
        world.network.at_message[number] = lambda: world.loop.outside(die)

    for _ in range(rng.choice([0, 1, 2])):
        at_message(rng.randint(20, 350))
    synced, version = world.disk.synced, rng.randint(1, 3)
    decided: list[int] = []

    def after_decision(content: bytes) -> None:
        synced(content)
        if world.oracle.durable >= version and not decided:
            decided.append(version)
            at_message(world.network.messages + rng.randint(1, 30))

    world.disk.synced = after_decision
    return WINDOW_S + 1.0


def controller_stands_still(world: World, rng: Random) -> float:
    """For longer than the heartbeat: nobody could report, so nobody may be lost for it."""
    world.innocent = True

    def stop() -> None:
        process = world.controller_process
        if process is not None and process.runs:
            world.stop(process)
            world.loop.call_later(rng.uniform(3.5, 6.3), world.go_on, process)

    world.loop.call_at(rng.uniform(3.0, WINDOW_S), stop)
    return 2 * WINDOW_S


def moment_of_silence(world: World, rng: Random) -> float:
    """A replica's reports, or the answers to them, do not arrive for a moment: it is not lost for that."""
    world.innocent = True
    # Once: a lost poll costs half of the heartbeat, and three in a row lose a replica by right.
    begin = rng.uniform(1.5, WINDOW_S)
    _away(world, rng, begin, begin + rng.uniform(0.1, 0.9))
    return WINDOW_S + 1.0


def replica_is_away(world: World, rng: Random) -> float:
    """Its reports, or the answers to them, do not arrive for long: the others go on without it."""
    begin = rng.uniform(3.0, WINDOW_S)
    _away(world, rng, begin, begin + AWAY_S)
    before: list[int] = []

    def look() -> None:
        if before and world.oracle.durable <= before[0]:
            world.violation = Violation(
                f"no round in {AWAY_S:g} s without one replica; version {before[0]}: {world.describe()}"
            )

    world.loop.call_at(begin, lambda: before.append(world.oracle.durable))
    world.loop.call_at(begin + AWAY_S - 0.01, look)
    return begin + AWAY_S


def returns_after_a_restart(world: World, rng: Random) -> float:
    """A replica is fenced while it is away, the controller dies, and then the replica comes back."""
    begin = rng.uniform(3.0, WINDOW_S)
    end = begin + rng.uniform(5.0, 12.0)
    _away(world, rng, begin, end)

    def die() -> None:
        process = world.controller_process
        if process is not None and process.alive:
            world.kill(process)

    if rng.random() < 0.8:
        world.loop.call_at(end - rng.uniform(0.0, 1.5), die)
    return end


def fails_unheard(world: World, rng: Random) -> float:
    """An instruction fails on a replica, and the fence that follows does not reach it."""

    def prepare() -> None:
        replicas = [each for each in world.replicas.values() if each.member is not None]
        if not replicas:
            return
        chosen = rng.choice(replicas)
        assert chosen.member is not None
        left = [rng.randint(0, 4)]

        def fails(body: Body) -> bool:
            if not isinstance(body, Receive | Verify):
                return False
            left[0] -= 1
            if left[0] >= 0 or world.loop.now > WINDOW_S:
                return False
            world.log("{} fails, and hears nothing any more", chosen.name)
            world.network.deaf.add(chosen.name)
            world.loop.call_later(rng.uniform(1.0, 6.0), world.network.deaf.discard, chosen.name)
            return True

        chosen.member.fails = fails

    world.loop.call_at(rng.uniform(2.5, 6.0), prepare)
    return 2 * WINDOW_S


SITUATIONS: dict[str, Situation] = {
    each.__name__: each
    for each in (
        controller_dies,
        controller_stands_still,
        moment_of_silence,
        replica_is_away,
        returns_after_a_restart,
        fails_unheard,
    )
}


def _away(world: World, rng: Random, begin: float, end: float) -> None:
    """One replica is cut off from the controller, in one direction or in both."""
    ways = rng.choice([["mute"], ["deaf"], ["deaf"], ["mute", "deaf"]])

    def start() -> None:
        replicas = [each for each in world.replicas.values() if each.member is not None]
        if not replicas:
            return
        name = rng.choice(replicas).name
        world.log("{} is {}", name, " and ".join(ways))
        for way in ways:
            names: set[str] = getattr(world.network, way)
            names.add(name)
            world.loop.call_at(end, names.discard, name)

    world.loop.call_at(begin, start)
