"""Situations that faults drawn one by one seldom come to: one of them is a whole schedule.

Nothing else goes wrong in it, so more can be asked of the fleet than that it is right and recovers: that no
replica is lost which did nothing wrong, or that the others go on without the one that is away.
"""

from collections.abc import Callable, Sequence
from random import Random

from deployments.ledger.decisions import Decision
from deployments.protocol.poll import Body, Receive, Verify
from tests.simulation.loop import Process
from tests.simulation.oracle import Violation
from tests.simulation.serve import start_publisher
from tests.simulation.world import World

WINDOW_S = 8.0  # in which a situation happens
AWAY_S = 20.0  # longer than a deadline, the heartbeat and a round together
TOLD_S = 0.3  # a report takes so long at most, where nothing else goes wrong
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

    def after_decision(decisions: Sequence[Decision]) -> None:
        synced(decisions)
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
    """An instruction of a round fails on a replica, and the fence that follows does not reach it."""

    def prepare() -> None:
        chosen = world.started_replica(rng)
        if chosen is None or chosen.member is None:
            return
        left = rng.randint(0, 4)

        def fails(body: Body) -> bool:
            nonlocal left
            if not isinstance(body, Receive | Verify):
                return False
            left -= 1
            if left >= 0 or world.loop.now > WINDOW_S:
                return False
            world.log("{} fails, and hears nothing any more", chosen.name)
            world.network.deaf.add(chosen.name)
            world.loop.call_later(rng.uniform(1.0, 6.0), world.network.deaf.discard, chosen.name)
            return True

        chosen.member.fails = fails

    world.loop.call_at(rng.uniform(2.5, 6.0), prepare)
    return 2 * WINDOW_S


def finished_alone(world: World, rng: Random) -> float:
    """Controller and publisher die after a decision, and no publisher comes: the round is finished."""
    world.innocent = True
    version, limit_s = rng.randint(1, 3), 15.0
    decided: list[int] = []
    synced = world.disk.synced

    def look() -> None:
        if not world.at_full_strength(version) and world.violation is None:
            world.violation = Violation(f"not finished {limit_s:g} s after its decision: {world.describe()}")
        world.publishes = True

    def die() -> None:
        for process in (world.controller_process, world.publisher):
            if process is not None and process.alive:
                world.kill(process)
        world.loop.call_later(limit_s, look)

    def after_decision(decisions: Sequence[Decision]) -> None:
        synced(decisions)
        all_take_part = all(each.member and each.member.admitted for each in world.replicas.values())
        if world.oracle.durable >= version and all_take_part and not decided:
            world.publishes = False
            decided.append(version)
            moment = world.network.messages + rng.randint(1, 24)
            world.network.at_message[moment] = lambda: world.loop.outside(die)

    world.disk.synced = after_decision
    return 2 * WINDOW_S + limit_s


def slow_joiner(world: World, rng: Random) -> float:
    """A replica is replaced, and the new one takes long to start while rounds go on."""
    begin, slow_s = rng.uniform(3.0, 5.0), rng.uniform(4.0, 10.0)
    limit_s = 1.5 * slow_s + 12.0

    def die() -> None:
        world.start_s = slow_s
        world.kill(rng.choice(list(world.replicas.values())).process)
        look()

    def look() -> None:
        if all(each.version is not None for each in world.replicas.values()):
            return
        if world.loop.now < begin + limit_s - 1.0:
            world.loop.call_later(0.1, look)
        else:
            world.violation = Violation(f"a slow joiner does not serve: {world.describe()}")

    world.loop.call_at(begin, die)
    return begin + limit_s


def two_publishers(world: World, rng: Random) -> float:
    """A second one, and now and then one of the two stands still, for longer than its lease or not."""
    others: list[Process] = []

    def second() -> None:
        others.append(start_publisher(world, "second"))

    def stand_still() -> None:
        process = rng.choice([world.publisher, *others])
        if process is not None and process.runs:
            world.log("{} stands still", process)
            world.loop.stop(process)
            world.loop.call_later(rng.choice([0.5, 3.0, 11.0]) * rng.uniform(0.7, 1.0), go_on, process)

    def go_on(process: Process) -> None:
        world.log("{} goes on", process)
        world.loop.go_on(process)

    world.loop.call_at(rng.uniform(1.0, 4.0), second)
    for _ in range(rng.randint(2, 5)):
        world.loop.call_at(rng.uniform(2.0, 2 * WINDOW_S), stand_still)
    end = 2 * WINDOW_S + 12.0
    world.loop.call_at(end, lambda: [world.kill(each) for each in others if each.alive])
    return end


def last_words(world: World, rng: Random) -> float:
    """A replica that has received is not heard any more, and an answer to its last report comes late."""

    def prepare() -> None:
        chosen = world.started_replica(rng)
        if chosen is None or chosen.member is None:
            return

        def fails(body: Body) -> bool:
            if isinstance(body, Receive) and not heard:
                heard.append(chosen.name)
                world.log("{} is not heard any more after its next report", chosen.name)
                world.network.last_words[chosen.name] = rng.uniform(1.5, 1.98)
                world.loop.call_later(AWAY_S / 2, world.network.mute.discard, chosen.name)
            return False

        heard: list[str] = []
        chosen.member.fails = fails

    world.loop.call_at(rng.uniform(2.5, 6.0), prepare)
    return 2 * WINDOW_S + AWAY_S / 2


def engine_dies(world: World, rng: Random) -> float:
    """The replica's process lives, and says so although no round comes; Serve would notice seconds later."""

    def die() -> None:
        if world.publisher is not None and world.publisher.alive:
            world.kill(world.publisher)
        chosen = world.started_replica(rng)
        if chosen is not None:
            chosen.lose_engine()
            world.loop.call_later(TOLD_S, look, chosen.name)

    def look(name: str) -> None:
        assert world.controller is not None
        members = world.controller[1]._ledger.status(world.loop.now).members
        if any(each.replica_id == name and each.state != "fenced" for each in members):
            world.violation = Violation(f"{name} is a member {TOLD_S:g} s after its engine: {members}")

    begin = rng.uniform(1.5, WINDOW_S)
    world.loop.call_at(begin - 0.01, setattr, world, "publishes", False)
    world.loop.call_at(begin, die)
    world.loop.call_at(begin + TOLD_S, setattr, world, "publishes", True)
    return WINDOW_S + TOLD_S


SITUATIONS: dict[str, Situation] = {
    each.__name__: each
    for each in (
        controller_dies,
        controller_stands_still,
        moment_of_silence,
        replica_is_away,
        returns_after_a_restart,
        fails_unheard,
        finished_alone,
        slow_joiner,
        two_publishers,
        last_words,
        engine_dies,
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
