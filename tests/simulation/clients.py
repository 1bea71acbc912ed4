"""Users: a request goes to a replica, and to another one when it is refused or the replica is lost."""

import asyncio
from typing import TYPE_CHECKING

from deployments.protocol.errors import Conflict, ReplicaUnavailable
from deployments.protocol.routing import Demand
from deployments.router.replica_policy import Candidate, order_candidates
from tests.simulation.network import Unreachable
from tests.simulation.work import Answer, EngineFailed

if TYPE_CHECKING:
    from tests.simulation.world import World

FIND_S = 20.0
ATTEMPT_S = 8.0
MAX_LOSSES = 2


async def one_request(world: "World") -> None:
    """What the router does with a request, as `Forwarder.forward` does it."""
    began = world.loop.now
    wants = world.oracle.newest_answer if world.rng.random() < 0.3 else 0
    refused: tuple[str, ...] = ()
    losses, why = 0, "no replica is ready"
    while world.loop.now - began < FIND_S:
        demand = Demand(min_version=wants, timeout_s=ATTEMPT_S, refused=refused)
        candidates = [
            Candidate(replica_id=name, version=each.stats[0], admitted=each.stats[1])
            for name, each in world.replicas.items()
        ]
        groups = order_candidates(candidates, demand)
        if not groups:
            await asyncio.sleep(0.3)
            continue
        name = groups[0][0]
        replica = world.replicas[name]
        seconds = 0.05 + world.rng.random() * 0.6
        try:
            call = world.network.call(
                lambda replica=replica: (replica.process, replica) if replica.process.alive else None,
                "answer",
                demand,
                seconds,
                reliable=True,
            )
            answer: Answer = await asyncio.wait_for(call, ATTEMPT_S + 2)
        except (ReplicaUnavailable, Conflict) as error:
            why = str(error)
        except (Unreachable, EngineFailed, TimeoutError) as error:
            why = f"{name} was lost: {error}"
            losses += 1
            if losses == MAX_LOSSES:
                return
        else:
            world.oracle.answered(name, began, answer.first, answer.last)
            return
        refused = (*refused, name)[-8:]
        await asyncio.sleep(0.05)
    world.oracle.not_answered(began, why)
