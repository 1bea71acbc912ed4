"""An ASGI application on a port of its own, inside a Serve replica."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from deployments.host.network import host_port

KEEP_ALIVE_S = 75

App = Callable[[Any, Any, Any], Awaitable[None]]


class HttpServer:
    """Serves an application in the running event loop; `address` is host:port."""

    def __init__(self, app: App, host: str, *, keep_alive_s: int = KEEP_ALIVE_S, backlog: int = 2048) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=backlog)
        port = listening.getsockname()[1]
        self.address = host_port(host, port)
        config = uvicorn.Config(
            app,
            interface="asgi3",  # uvicorn cannot detect it on a bound method
            log_config=None,
            log_level="critical",
            access_log=False,
            ws="none",
            lifespan="off",  # an engine enters its application's lifespan itself
            timeout_keep_alive=keep_alive_s,
            backlog=backlog,
        )
        self._server = _WithoutSignals(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task
        # uvicorn leaves connections with a pending response.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for task in self._server.server_state.tasks:
            task.cancel()


class _WithoutSignals(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the Serve replica handles signals
