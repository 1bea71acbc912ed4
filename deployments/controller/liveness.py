"""Whether a rollout replica's process is still there: asked of Ray, when the replica has gone quiet."""

from collections.abc import Callable

import ray
from ray import serve

IsAlive = Callable[[str], bool]  # a replica id, as it reports it; may block

PREFIX = "SERVE_REPLICA::"
NAMESPACE = "serve"


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
