"""Recovery of a committed version that replicas wait for and nobody gives them.

The store is written after the commit, off the critical path. If every replica dies before the write ends
(for example because the host ran out of memory), the version exists nowhere. If the write fails (a full
disk), only the replicas that serve it have it, and those that join cannot load it from them.
The trainer then publishes its current weights as a new version: a round brings joiners up to date as well.
"""

import asyncio
from collections.abc import Awaitable, Callable

from deployments.logs import serve_logger
from deployments.protocol.status import FleetStatus

CHECK_PERIOD_S = 5.0
CONFIRMATIONS = 3  # checks in a row: a write to the store that is under way may still complete

logger = serve_logger()


def is_lost(fleet: FleetStatus) -> bool:
    """Whether joiners wait for a version that neither a replica nor the store holds."""
    committed = fleet.committed_version
    joiners = [member for member in fleet.members if member.state == "joining"]
    holders = [member for member in fleet.members if member.admitted or member.version == committed]
    in_store = committed == 0 or fleet.stored_version == committed
    return bool(joiners) and not holders and not in_store and fleet.round is None


def is_starved(fleet: FleetStatus, published: int) -> bool:
    """Whether joiners have waited long for the version that this trainer published, which replicas serve.

    Never for another publisher's version: the trainer's weights would take its place.
    """
    waiting = any(member.state == "joining" for member in fleet.members)
    own = fleet.committed_version == published
    return own and waiting and fleet.store_problem is not None and fleet.round is None


async def watch(
    fleet_status: Callable[[], Awaitable[FleetStatus]],
    publish: Callable[[str], Awaitable[object]],
    published: Callable[[], int],
    period_s: float = CHECK_PERIOD_S,
) -> None:
    """Check the fleet periodically, and publish when replicas wait for its version in vain; until cancelled.

    Args:
        publish: publishes the current weights; its argument is the new version's label.
        published: the version that this trainer published last.
    """
    lost_checks = 0
    while True:
        await asyncio.sleep(period_s)
        try:
            fleet = await fleet_status()
            lost = is_lost(fleet)
            lost_checks = lost_checks + 1 if lost or is_starved(fleet, published()) else 0
            if lost_checks >= CONFIRMATIONS:
                lost_checks = 0
                what = f"version {fleet.committed_version} {'was lost' if lost else 'was not stored'}"
                logger.warning("%s, and replicas wait for it: publishing anew", what)
                await publish(what)
        except Exception as error:  # the controller is unreachable or the round failed: check again later
            logger.debug("cannot check the fleet: %s", error)
