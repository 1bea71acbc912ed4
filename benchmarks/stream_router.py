"""One router process of the fleet, as Serve runs it but without Serve: uvicorn, uvloop, our application.

    python -m benchmarks.stream_router PORT ENGINE_PORT...

The replicas are chosen in turn. Several processes may listen on one port.
"""

import argparse
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
import uvloop

from app.http.auth import Guard
from app.http.ingress import build_app
from app.settings.security import Tokens, TokenSource
from deployments.protocol.routing import Demand
from deployments.router.forwarding import RouterLimits
from deployments.router.router import Router

LIMITS = RouterLimits(
    max_ongoing_requests=100_000,
    max_body_bytes=64 << 20,
    request_timeout_s=30.0,
)


class InTurn:
    """Stands for Serve's handle of the replicas."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)

    @asynccontextmanager
    async def choose_replica(self, demand: Demand, *, _reserve: bool) -> AsyncIterator[Any]:
        port = next(self._ports)
        metadata = {"address": f"127.0.0.1:{port}", "key": "key"}
        yield SimpleNamespace(replica_id=str(port), replica_metadata=metadata)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("engines", type=int, nargs="+")
    options = parser.parse_args()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    router = Router(InTurn(options.engines), LIMITS)  # type: ignore[arg-type]
    nobody = TokenSource(tokens=(), file=None)
    controller: Any = None  # only requests that pass are sent
    app = build_app(Guard(Tokens(operator=nobody, user=nobody)), router, controller, scrape=router.metrics)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", options.port))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", backlog=4096)
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    uvloop.run(main())
