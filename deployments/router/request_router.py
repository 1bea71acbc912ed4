"""Serve's extension point for the choice of a replica, around the policy in `routing`.

Nothing that others test with `isinstance` may be defined in this module: Serve pickles the module
of a request router by value, so that its classes are copies in the process that routes.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.request_headers import Demand
from deployments.router.policy import Candidate, rank


class FleetRequestRouter(RequestRouter):
    """Serve's request router for the fleet.

    Without Serve's FIFOMixin, on purpose: with it a choice made for one request may be given to
    another, and affinity is lost. Our router only asks for a choice and sends nothing through Serve.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        demand = Demand()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            demand = next((a for a in pending_request.args if isinstance(a, Demand)), demand)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[name] for name in group] for group in rank(_candidates(by_id), demand)]


def _candidates(replicas: dict[str, RunningReplica]) -> list[Candidate]:
    return [
        Candidate(
            replica_id=name,
            version=int(replica.routing_stats.get("version", 0)),
            admitted=bool(replica.routing_stats.get("admitted", True)),
            in_flight=int(replica.routing_stats.get("in_flight", 0)),
        )
        for name, replica in replicas.items()
    ]
