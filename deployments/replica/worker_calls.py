"""Calls to a thread of each worker, not delayed until a decoding step ends.

vLLM runs calls between two steps, which can take a second on a CPU, and each delays a step: an adapter's load
took twice as long, and an update's gap was a third longer. Each worker has a Unix socket to its replica: one
line of JSON per call and answer. For a worker on another host, or a lost connection, calls go through vLLM.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from deployments.host.logs import serve_logger
from deployments.host.shared_memory import DIRECTORY, owner
from deployments.weights.staging.staged_update import MAX_MESSAGE

CONNECT_S = 10.0

Workers = Callable[..., Awaitable[list[Any]]]
logger = serve_logger()


class WorkerCalls:
    """Called as `ReplicaEngine.workers`, with arguments of JSON types; `workers` calls through vLLM."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._connections: list[_Connection] = []

    async def connect(self) -> None:
        path = DIRECTORY / owner().name("worker-calls")
        try:
            listener = _listen(path)
        except OSError as error:  # no room in shared memory
            logger.warning("calls to workers wait for decoding steps: %s: %s", path, error)
            return
        opened: list[_Connection] = []
        try:
            shared = await self._workers("answer_calls_at", path=str(path))
            if all(shared):
                async with asyncio.timeout(CONNECT_S):
                    while len(opened) < len(shared):
                        opened.append(await _accept(listener))
                self._connections, opened = opened, []
        except TimeoutError:
            logger.warning(
                "calls to workers wait for decoding steps: %d of %d did not connect within %g s",
                len(shared) - len(opened),
                len(shared),
                CONNECT_S,
            )
        finally:
            listener.close()  # also closes connections that were not accepted
            path.unlink(missing_ok=True)
            for each in opened:
                each.close()

    @property
    def direct(self) -> bool:
        """Calls that bypass vLLM may wait in the worker."""
        return bool(self._connections)

    async def __call__(self, method: str, **arguments: Any) -> list[Any]:
        if self._connections:
            try:
                return await asyncio.gather(*(each.call(method, arguments) for each in self._connections))
            except ConnectionError:  # vLLM raises if the engine is dead
                self.close()
        return await self._workers(method, **arguments)

    def close(self) -> None:
        for each in self._connections:
            each.close()
        self._connections = []


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._one_at_a_time = asyncio.Lock()

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        async with self._one_at_a_time:
            number = next(self._numbers)
            self._writer.write(json.dumps([number, method, arguments]).encode() + b"\n")
            await self._writer.drain()
            answered = -1
            while answered != number:  # the answer to a cancelled call may come first
                line = await self._reader.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionResetError("the worker closed its connection")
                answered, answer, error = json.loads(line)
        if error is not None:
            raise RuntimeError(error)
        return answer

    def close(self) -> None:
        self._writer.close()


def _listen(path: Path) -> socket.socket:
    """asyncio's server leaks a connection if it is closed while accepting it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


async def _accept(listener: socket.socket) -> _Connection:
    accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    return _Connection(*await asyncio.open_unix_connection(sock=accepted))


def open_connection(path: Path) -> socket.socket:
    """Raises OSError if the socket is not on this host."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def answer_calls(connection: socket.socket, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Until the replica closes the connection or exits."""
    with connection, connection.makefile("rb") as calls, suppress(ConnectionError):
        for line in calls:
            number, method, arguments = json.loads(line)
            answer, error = None, None
            try:
                answer = methods[method](**arguments)
            except Exception as raised:  # sent to the caller
                error = f"{type(raised).__name__}: {raised}"[:MAX_MESSAGE]
            connection.sendall(json.dumps([number, answer, error]).encode() + b"\n")
