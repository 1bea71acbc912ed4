"""Whether a rollout replica's process is still there: asked of Ray, when the replica has gone quiet.

One that is there and stands still is ended, once it counts as lost. Serve would do that only after three
health checks of 30 s, and would wait for it to drain; meanwhile it holds its GPU.
"""

import asyncio
from collections.abc import Callable, Iterable

import ray
from ray import serve
from ray.actor import ActorHandle

from deployments.host.logs import serve_logger

IsAlive = Callable[[str], bool]  # a replica id, as it reports it; may block
End = Callable[[str], None]  # likewise

PREFIX = "SERVE_REPLICA::"
NAMESPACE = "serve"
LOOKUP_S = 5.0

logger = serve_logger()


class ServeReplicas:
    """Replicas by the names that Serve gives their actors.

    Args:
        deployment: the rollout deployment of the application that asks.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    def exists(self, replica_id: str) -> bool:
        return self._find(replica_id) is not None

    def end(self, replica_id: str) -> None:
        """Kill its process, also one that is stopped."""
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


class Processes:
    """Looks the processes of silent replicas up and ends them, each in a thread that Ray may hold up."""

    def __init__(self, is_alive: IsAlive, end: End) -> None:
        self._is_alive = is_alive
        self._end = end
        self._asked: dict[tuple[str, str], asyncio.Task[bool]] = {}  # by replica id and incarnation
        self._ending: set[asyncio.Task[None]] = set()

    async def gone(self, silent: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those among these replicas (id, incarnation), and those asked for before, that do not exist.

        Returns with the first answers, at most after `LOOKUP_S`; nothing is asked for twice meanwhile.
        """
        for member in silent:
            if member not in self._asked:
                lookup = asyncio.to_thread(self._is_alive, member[0])
                self._asked[member] = asyncio.get_running_loop().create_task(lookup)
        if not self._asked:
            return []
        await asyncio.wait(self._asked.values(), timeout=LOOKUP_S, return_when=asyncio.FIRST_COMPLETED)
        answered = {member: asked for member, asked in self._asked.items() if asked.done()}
        for member in answered:
            del self._asked[member]
        for replica_id, _ in () if answered else self._asked:
            logger.warning(
                "replica %s is silent, and Ray has not said within %g s whether its process exists: its "
                "heartbeat decides",
                replica_id,
                LOOKUP_S,
            )
        return [member for member, asked in answered.items() if not _result(asked)]

    def end(self, replica_id: str) -> None:
        """End the process of a replica that is lost for good; nothing waits for it."""
        self._ending.add(task := asyncio.get_running_loop().create_task(self._try_end(replica_id)))
        task.add_done_callback(self._ending.discard)

    async def _try_end(self, replica_id: str) -> None:
        try:
            await asyncio.to_thread(self._end, replica_id)
        except Exception as error:  # Serve's own health check ends it, minutes later
            logger.warning("replica %s could not be ended: %s: %s", replica_id, type(error).__name__, error)

    def close(self) -> None:
        """Wait for no answer."""
        for task in (*self._asked.values(), *self._ending):
            task.cancel()


def _result(asked: asyncio.Task[bool]) -> bool:
    """Whether the process exists; what cannot be looked up may exist."""
    error = asked.exception()
    if error is not None:
        logger.warning("a silent replica could not be looked up: %s: %s", type(error).__name__, error)
    return error is not None or asked.result()
