"""Whether a rollout replica's process is still there: asked of Ray, when the replica has gone quiet."""

import asyncio
from collections.abc import Callable, Iterable

import ray
from ray import serve

from deployments.logs import serve_logger

IsAlive = Callable[[str], bool]  # a replica id, as it reports it; may block

PREFIX = "SERVE_REPLICA::"
NAMESPACE = "serve"
LOOKUP_S = 5.0

logger = serve_logger()


class ServeReplicas:
    """Looks replicas up by the names that Serve gives their actors.

    Args:
        deployment: the rollout deployment of the application that asks.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    def __call__(self, replica_id: str) -> bool:
        app_name = serve.get_replica_context().app_name
        name = f"{PREFIX}{app_name}#{self._deployment}#{replica_id}"
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # Ray: no actor of this name, or it is dead
            return False
        return True


class Lookups:
    """Looks the processes of silent replicas up, each in a thread that Ray may hold up."""

    def __init__(self, is_alive: IsAlive) -> None:
        self._is_alive = is_alive
        self._asked: dict[tuple[str, str], asyncio.Task[bool]] = {}  # by replica id and incarnation

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

    def close(self) -> None:
        """Wait for no answer."""
        for asked in self._asked.values():
            asked.cancel()


def _result(asked: asyncio.Task[bool]) -> bool:
    """Whether the process exists; what cannot be looked up may exist."""
    error = asked.exception()
    if error is not None:
        logger.warning("a silent replica could not be looked up: %s: %s", type(error).__name__, error)
    return error is not None or asked.result()
