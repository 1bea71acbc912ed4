"""Whether a rollout replica's process is still there: asked of Ray, when the replica has gone quiet."""

from collections.abc import Callable

import ray

IsAlive = Callable[[str], bool]  # a replica id, as it reports it; may block

PREFIX = "SERVE_REPLICA::"
NAMESPACE = "serve"


class ServeReplicas:
    """Looks replicas up by the names that Serve gives their actors.

    Args:
        app_name, deployment: of the rollout deployment; for replicas that report only their unique id.
    """

    def __init__(self, app_name: str, deployment: str) -> None:
        self._prefix = f"{PREFIX}{app_name}#{deployment}#"

    def __call__(self, replica_id: str) -> bool:
        name = replica_id if replica_id.startswith(PREFIX) else f"{self._prefix}{replica_id}"
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # Ray: no actor of this name, or it is dead
            return False
        return True
