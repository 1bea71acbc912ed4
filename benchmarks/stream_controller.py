"""The controller's ledger of rollouts, as routers call it.

    python -m benchmarks.stream_controller DIRECTORY

Prints its address and key.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.calls.rpc import CallServer
from deployments.controller.rollout_calls import Rollouts
from deployments.protocol.rollouts import RolloutLimits


class Controller:
    """What a router asks of the controller when a captured request comes."""

    def __init__(self, directory: Path) -> None:
        self._store = Rollouts(directory, RolloutLimits(), "fleet")

    async def rollouts(self, name: str, *arguments: Any) -> Any:
        """See `Rollouts.call`."""
        return await self._store.call(name, {}, *arguments)


async def main() -> None:
    server = CallServer(Controller(Path(sys.argv[1])), lambda: "127.0.0.1")
    print(json.dumps(asdict(await server.address())), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
