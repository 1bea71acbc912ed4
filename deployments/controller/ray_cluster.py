"""Asks Ray whether silent replicas' processes exist.

A process that hangs is killed once its replica counts as lost. Serve would need three health checks of 30 s,
and a drain, while it holds its GPU.
"""

import asyncio
from collections.abc import Callable, Iterable

import ray
from ray import serve
from ray.actor import ActorHandle

from deployments.host.logs import serve_logger

IsAlive = Callable[[str], bool]  # takes the replica id that it reports; may block
Kill = Callable[[str], None]

PREFIX = "SERVE_REPLICA::"
NAMESPACE = "serve"
LOOKUP_S = 5.0

logger = serve_logger()


class ServeReplicas:
    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    def exists(self, replica_id: str) -> bool:
        return self._find(replica_id) is not None

    def kill(self, replica_id: str) -> None:
        actor = self._find(replica_id)
        if actor is not None:
            ray.kill(actor)

    def _find(self, replica_id: str) -> ActorHandle | None:
        app_name = serve.get_replica_context().app_name
        name = f"{PREFIX}{app_name}#{self._deployment}#{replica_id}"
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # Ray: no actor of this name, or it is dead
            return None


class ReplicaProcesses:
    """Looks up and kills silent replicas' processes, each in a thread that Ray may block."""

    def __init__(self, is_alive: IsAlive, kill: Kill) -> None:
        self._is_alive = is_alive
        self._kill = kill
        self._lookups: dict[tuple[str, str], asyncio.Task[bool]] = {}
        self._kills: set[asyncio.Task[None]] = set()

    async def gone(self, silent: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Members (id, incarnation) without a process, among these and earlier calls'.

        Returns with the first results, at most after `LOOKUP_S`; no lookup runs twice at a time.
        """
        for member in silent:
            if member not in self._lookups:
                lookup = asyncio.to_thread(self._is_alive, member[0])
                self._lookups[member] = asyncio.get_running_loop().create_task(lookup)
        if not self._lookups:
            return []
        await asyncio.wait(self._lookups.values(), timeout=LOOKUP_S, return_when=asyncio.FIRST_COMPLETED)
        finished = {member: lookup for member, lookup in self._lookups.items() if lookup.done()}
        for member in finished:
            del self._lookups[member]
        for replica_id, _ in () if finished else self._lookups:
            logger.warning(
                "replica %s is silent, and Ray has not answered within %g s whether its process exists: its "
                "heartbeat decides",
                replica_id,
                LOOKUP_S,
            )
        return [member for member, lookup in finished.items() if not _exists(lookup)]

    def kill(self, replica_id: str) -> None:
        """Does not wait."""
        self._kills.add(task := asyncio.get_running_loop().create_task(self._try_kill(replica_id)))
        task.add_done_callback(self._kills.discard)

    async def _try_kill(self, replica_id: str) -> None:
        try:
            await asyncio.to_thread(self._kill, replica_id)
        except Exception as error:  # Serve's own health check replaces it, minutes later
            logger.warning("failed to kill replica %s: %s: %s", replica_id, type(error).__name__, error)

    def close(self) -> None:
        """Threads that Ray blocks are left."""
        for task in (*self._lookups.values(), *self._kills):
            task.cancel()


def _exists(lookup: asyncio.Task[bool]) -> bool:
    error = lookup.exception()
    if error is not None:
        logger.warning("failed to look up a silent replica: %s: %s", type(error).__name__, error)
    return error is not None or lookup.result()
