"""The choice of a replica for a request: a pure policy, without Ray.

The router knows each replica's version and admission as of its last routing statistics. The replica
checks both again, and its decision is final.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from deployments.request_headers import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as of its last routing statistics."""

    replica_id: str
    version: int
    admitted: bool
    in_flight: int = 0  # sequences that other routers have there


def eligible_loads(candidates: Sequence[Candidate], demand: Demand) -> dict[str, int]:
    """The sequences in flight at each replica that may answer.

    A replica that is older than the demanded version counts: it may reach it in time, and what is known of
    its version is late. Just after an update all prompts would go to the first replica that reported it.
    """
    return {
        candidate.replica_id: _load(candidate, demand)
        for candidate in candidates
        if candidate.admitted and candidate.replica_id not in demand.refused
    }


def order_candidates(candidates: Sequence[Candidate], demand: Demand) -> list[list[str]]:
    """Groups of replica ids, in the order in which they are to be tried; at most two in a group.

    Replicas that are not admitted are left out. Replicas older than the demanded version come after
    the current ones, because they may reach it in time. Replicas that refused the request come last.
    Among equals, a session is mapped to its replica by rendezvous hashing, so that a change of the
    membership moves only the sessions of the replica that left. Without a session, two replicas are
    drawn and the less loaded one comes first (power of two choices). A preferred replica comes before
    all others, unless it refused.
    """
    load = {candidate.replica_id: _load(candidate, demand) for candidate in candidates}
    groups: dict[tuple[bool, bool], list[str]] = {}
    for candidate in candidates:
        if candidate.admitted:
            key = candidate.replica_id in demand.refused, candidate.version < demand.min_version
            groups.setdefault(key, []).append(candidate.replica_id)
    ordered: list[list[str]] = []
    for _, group in sorted(groups.items()):
        if demand.session_id is not None:
            ordered += [[replica_id] for replica_id in _by_affinity(group, demand.session_id)]
        else:
            ordered.append(sorted(random.sample(group, min(2, len(group))), key=load.__getitem__))
    preferred = demand.prefer
    if preferred is not None and preferred in eligible_loads(candidates, demand):
        return [[preferred], *ordered]
    return ordered


def _load(candidate: Candidate, demand: Demand) -> int:
    """What the asking router has there, which it knows exactly, and what the others had a moment ago."""
    return candidate.in_flight + demand.in_flight.get(candidate.replica_id, 0)


def _by_affinity(replica_ids: Collection[str], session_id: str) -> list[str]:
    """Rendezvous hashing: highest weight first."""

    def weight(replica_id: str) -> bytes:
        return blake2b(f"{session_id}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=weight, reverse=True)
