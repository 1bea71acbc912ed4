"""When the committed version exists nowhere any more: no replica serves it, and the store lacks it.

The store is written after the commit, off the critical path. If every replica dies before that
(a host out of memory takes them together), joiners wait for a version that nobody can give them.
The trainer then publishes what it has, as a new and honest version.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deployments.logs import serve_logger

LOOK_S = 5.0
PATIENCE = 3  # looks in a row: a store that is being written gets its time

logger = serve_logger()


def is_lost(fleet: Mapping[str, Any]) -> bool:
    """Whether joiners wait for a version that neither a replica nor the store holds.

    Args:
        fleet: what the controller says of the fleet.
    """
    committed, stored = fleet["committed_version"], fleet["stored_version"]
    waiting = [member for member in fleet["members"] if member["state"] == "joining"]
    holders = [member for member in fleet["members"] if member["admitted"] or member["version"] == committed]
    in_store = committed == 0 or stored == committed
    return bool(waiting) and not holders and not in_store and fleet["round"] is None


async def watch(
    ask: Callable[[], Awaitable[Mapping[str, Any]]], publish: Callable[[str], Awaitable[Any]]
) -> None:
    """Look at the fleet for good, and publish when its version is lost."""
    looks = 0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            fleet = await ask()
            looks = looks + 1 if is_lost(fleet) else 0
            if looks >= PATIENCE:
                looks = 0
                lost = fleet["committed_version"]
                logger.warning("version %s is in no replica and not in the store: publishing anew", lost)
                await publish(f"version {lost} was lost")
        except Exception as error:  # the controller or the fleet is away: look again
            logger.debug("cannot look at the fleet: %s", error)
