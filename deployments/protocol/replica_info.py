"""What Serve carries from a replica to every router, as the dicts that Serve's two hooks want.

record_replica_metadata   once, when the replica becomes ready     ReplicaEndpoint
record_routing_stats      every `request_routing_stats_period_s`   RoutingStats
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    """Where a replica's own HTTP server is."""

    address: str  # host:port
    key: str  # the value of `KEY_HEADER` that the replica accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """The state of a replica that the routing policy reads; the defaults hold until the first report."""

    version: int = 0
    admitted: bool = True
    in_flight: Mapping[str, int] = field(default_factory=dict)  # load, by the router that sent it
