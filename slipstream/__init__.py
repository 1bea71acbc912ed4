"""Slipstream's public API: what programs outside this repository may import.

    import slipstream

    with slipstream.FleetClient.connect("http://127.0.0.1:8000") as fleet:
        print(fleet.send(slipstream.calls.fleet()).committed_version)

This module needs neither Ray nor torch nor vLLM. `slipstream.publisher` is for a trainer of your own,
`slipstream.training` for losses of your own and for programs that talk to the trainer deployment, and
`slipstream.environments` for environments of your own.
"""

from app.client import calls
from app.client.completions import Answer, Completion, chat, complete
from app.client.connection import AsyncFleetClient, Call, FleetClient, FleetError

__all__ = [
    "Answer",
    "AsyncFleetClient",
    "Call",
    "Completion",
    "FleetClient",
    "FleetError",
    "calls",
    "chat",
    "complete",
]
