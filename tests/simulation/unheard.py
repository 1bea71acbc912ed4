"""A replica that fails in an instruction, and does not hear that it is fenced for it."""

from random import Random
from typing import TYPE_CHECKING

from deployments.protocol.poll import Body

if TYPE_CHECKING:
    from tests.simulation.world import World

WINDOW_S = 8.0  # in which a situation happens


def plan_unheard_failure(world: "World", rng: Random, kinds: tuple[type[Body], ...], *, skipped: int) -> None:
    """One replica fails in an instruction of these kinds, after up to `skipped` of them."""

    def prepare() -> None:
        chosen = world.started_replica(rng)
        if chosen is None or chosen.member is None:
            return
        left = [rng.randint(0, skipped)]

        def fails(body: Body) -> bool:
            if not isinstance(body, kinds):
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
