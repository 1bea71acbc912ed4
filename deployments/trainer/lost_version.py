"""Recovery of a committed version that exists nowhere: no replica serves it, and it is not in the store.

The store is written after the commit, off the critical path. If every replica dies before the write ends
(for example because the host ran out of memory), joiners wait for a version that nobody can give them.
The trainer then publishes its current weights as a new version.
"""

import asyncio
from collections.abc import Awaitable, Callable

from deployments.logs import serve_logger
from deployments.protocol import FleetStatus

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


async def watch(
    fleet_status: Callable[[], Awaitable[FleetStatus]],
    publish: Callable[[str], Awaitable[object]],
    period_s: float = CHECK_PERIOD_S,
) -> None:
    """Check the fleet periodically, and publish when its version is lost. Runs until cancelled.

    Args:
        publish: publishes the current weights; its argument is the new version's label.
    """
    lost_checks = 0
    while True:
        await asyncio.sleep(period_s)
        try:
            fleet = await fleet_status()
            lost_checks = lost_checks + 1 if is_lost(fleet) else 0
            if lost_checks >= CONFIRMATIONS:
                lost_checks = 0
                version = fleet.committed_version
                logger.warning("version %s is in no replica and not in the store: publishing anew", version)
                await publish(f"version {version} was lost")
        except Exception as error:  # the controller is unreachable or the round failed: check again later
            logger.debug("cannot check the fleet: %s", error)
