"""Serve's extension point for the choice of a replica, around the policy in `policy`.

Define nothing in this module that other modules test with `isinstance`: Serve pickles the module of a
request router by value, so its classes are copies in the process that routes.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.replica_info import RoutingStats
from deployments.request_headers import Demand
from deployments.router.policy import Candidate, eligible_loads, order_candidates


class FleetRequestRouter(RequestRouter):
    """Serve's request router for the fleet.

    It goes without Serve's FIFOMixin on purpose: the mixin may give a choice made for one request to
    another, and session affinity is lost. Our router only asks for a choice and sends nothing through Serve.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        demand = Demand()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            demand = next((a for a in pending_request.args if isinstance(a, Demand)), demand)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [_candidate(*item, demand.router) for item in by_id.items()]
        if demand.census is not None:
            demand.census.loads = eligible_loads(candidates, demand)
            demand.census.metadata = {name: each.replica_metadata for name, each in by_id.items()}
        groups = order_candidates(candidates, demand)
        return [[by_id[replica_id] for replica_id in group] for group in groups]


def _candidate(replica_id: str, replica: RunningReplica, router: str) -> Candidate:
    stats = RoutingStats(**replica.routing_stats)
    others = sum(count for name, count in stats.in_flight.items() if name != router)
    return Candidate(replica_id=replica_id, version=stats.version, admitted=stats.admitted, in_flight=others)
