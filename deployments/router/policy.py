"""Where a request goes: a pure policy, which knows nothing of Ray.

The router knows each replica's version and admission as of its last routing statistics; the
replica itself checks again, and is the authority.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from deployments.request_headers import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    replica_id: str
    version: int
    admitted: bool
    in_flight: int = 0  # as of its last routing statistics, from all routers


def rank(candidates: Sequence[Candidate], demand: Demand) -> list[list[str]]:
    """Replica ids, best first; the ranks separate those that are behind from the others.

    A session's replica comes first, found by rendezvous hashing, so that a membership change
    moves only the sessions of the replica that left. Without a session: the less loaded of two
    that are drawn. Replicas that are behind the demanded version come later, as they may reach it in
    time, and those that have refused come last.
    """
    # A router's own count is exact, and misses what others send; the replica's is late.
    load = {c.replica_id: max(c.in_flight, demand.in_flight.get(c.replica_id, 0)) for c in candidates}
    groups: dict[tuple[bool, bool], list[str]] = {}
    for candidate in candidates:
        if candidate.admitted:
            place = candidate.replica_id in demand.refused, candidate.version < demand.min_version
            groups.setdefault(place, []).append(candidate.replica_id)
    ranks: list[list[str]] = []
    for _, group in sorted(groups.items()):
        if demand.session_id is not None:
            ranks += [[home] for home in _by_weight(group, demand.session_id)]
        else:
            ranks.append(sorted(random.sample(group, min(2, len(group))), key=load.__getitem__))
    return ranks


def _by_weight(replica_ids: Collection[str], session_id: str) -> list[str]:
    def weight(replica_id: str) -> bytes:
        return blake2b(f"{session_id}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=weight, reverse=True)
