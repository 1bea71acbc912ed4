"""Serve's extension point for the choice of a replica; see `replica_policy`.

Serve pickles this module by value: no other module may use `isinstance` with its classes.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.protocol.routing import Demand, RoutingStats
from deployments.router.replica_policy import Candidate, eligible_loads, order_candidates


class FleetRequestRouter(RequestRouter):
    """Without Serve's FIFOMixin, which may swap requests' replicas and so break session affinity."""

    _last: "_Known | None" = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        demand = Demand()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            demand = next((a for a in pending_request.args if isinstance(a, Demand)), demand)
        known = self._known(candidate_replicas, demand.router)
        if demand.census is not None:
            demand.census.loads = eligible_loads(known.candidates, demand)
            demand.census.metadata = {name: each.replica_metadata for name, each in known.replicas.items()}
        groups = order_candidates(known.candidates, demand)
        if demand.choice is not None and groups:  # nothing is reserved, so Serve takes the first
            demand.choice.version = known.version(groups[0][0])
        return [[known.replicas[replica_id] for replica_id in group] for group in groups]

    def _known(self, replicas: list[RunningReplica], router: str) -> "_Known":
        """Serve makes a new list on every change, also of statistics."""
        if self._last is None or self._last.made_of is not replicas or self._last.router != router:
            self._last = _Known(replicas, router)
        return self._last


class _Known:
    def __init__(self, made_of: list[RunningReplica], router: str) -> None:
        self.made_of = made_of
        self.router = router
        self.replicas = {replica.replica_id.unique_id: replica for replica in made_of}
        self.candidates = [_candidate(*item, router) for item in self.replicas.items()]

    def version(self, replica_id: str) -> int:
        return next(each.version for each in self.candidates if each.replica_id == replica_id)


def _candidate(replica_id: str, replica: RunningReplica, router: str) -> Candidate:
    stats = RoutingStats(**replica.routing_stats)
    others = sum(count for name, count in stats.in_flight.items() if name != router)
    return Candidate(
        replica_id=replica_id,
        version=stats.version,
        admitted=stats.admitted,
        in_flight=others,
    )
