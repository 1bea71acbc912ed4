"""Situations of adapters, as `tests.simulation.situations` has them for rounds: each is a whole schedule."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from deployments.ledger.decisions import Decision
from deployments.protocol.adapters import LoadAdapter, SetAdapters
from tests.simulation.unheard import WINDOW_S, plan_unheard_failure

if TYPE_CHECKING:
    from tests.simulation.situations import Situation
    from tests.simulation.world import World


def controller_dies_in_a_load(world: "World", rng: Random) -> float:
    """Around a change of the catalog, up to four times. The replicas live: none may be lost."""
    world.innocent = True
    power, ids, limit = rng.random() < 0.3, rng.randint(1, 8), rng.randint(1, 4)
    assert world.adapters is not None
    oracle, deaths = world.adapters.oracle, [0]

    def die() -> None:
        process = world.controller_process
        if process is not None and process.alive and world.loop.now < WINDOW_S:
            world.kill(process)
            if power:
                world.disk.lose_power()

    synced = world.disk.synced

    def after_decision(decisions: Sequence[Decision]) -> None:
        before = oracle.durable
        synced(decisions)
        if oracle.durable != before and oracle.durable.last_id >= ids and deaths[0] < limit:
            deaths[0] += 1
            moment = world.network.messages + rng.randint(1, 30)
            world.network.at_message[moment] = lambda: world.loop.outside(die)

    world.disk.synced = after_decision
    return WINDOW_S + 1.0


def adapter_fails_unheard(world: "World", rng: Random) -> float:
    """A load fails on a replica, and the fence that follows does not reach it."""
    plan_unheard_failure(world, rng, (LoadAdapter, SetAdapters), skipped=2)
    return 2 * WINDOW_S


def full_disk(world: "World", rng: Random) -> float:
    """No file grows for a while: neither the journal nor the fleet's copies. Nobody is lost for it."""
    world.innocent = True
    begin = rng.uniform(2.0, 5.0)
    world.loop.call_at(begin, setattr, world.disk, "full", True)
    world.loop.call_at(begin + rng.uniform(1.0, 6.0), setattr, world.disk, "full", False)
    return 2 * WINDOW_S


def slow_loads(world: "World", rng: Random) -> float:
    """Engines take long over adapters now and then, and the controller may die meanwhile."""
    world.work.slow = rng.choice([0.1, 0.3])

    def die() -> None:
        process = world.controller_process
        if process is not None and process.alive:
            world.kill(process)

    for _ in range(rng.choice([0, 1, 2])):
        world.loop.call_at(rng.uniform(3.0, 2 * WINDOW_S), die)
    return 2 * WINDOW_S


ADAPTER_SITUATIONS: "dict[str, Situation]" = {
    each.__name__: each for each in (controller_dies_in_a_load, adapter_fails_unheard, full_disk, slow_loads)
}
