"""Where a request goes: a pure policy, which knows nothing of Ray.

The router knows each replica's version and admission as of its last routing statistics; the
replica itself checks again, and is the authority.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of the replica that answers it.

    Attributes:
        min_version: the oldest weights that may answer.
        timeout_s: how long to wait for them.
        session_id: requests of one session go to one replica while it is there.
        excluded: replicas that have refused this request already.
    """

    min_version: int = 0
    timeout_s: float = 0.0
    session_id: str | None = None
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    replica_id: str
    version: int
    admitted: bool


def rank(candidates: Sequence[Candidate], demand: Demand) -> list[list[str]]:
    """Replica ids, best rank first; Serve takes the one with the shortest queue within a rank.

    A session's replica comes first, found by rendezvous hashing, so that a membership change
    moves only the sessions of the replica that left. Without a session: the power of two choices.
    Replicas that are behind the demanded version come last: they may reach it in time.
    """
    usable = [c for c in candidates if c.admitted and c.replica_id not in demand.excluded]
    fresh = [c.replica_id for c in usable if c.version >= demand.min_version]
    behind = [c.replica_id for c in usable if c.version < demand.min_version]
    if demand.session_id is None:
        ranks = [random.sample(group, min(2, len(group))) for group in (fresh, behind)]
    else:
        ranks = [[home] for group in (fresh, behind) for home in _by_weight(group, demand.session_id)]
    return [group for group in ranks if group]


def _by_weight(replica_ids: Collection[str], session_id: str) -> list[str]:
    def weight(replica_id: str) -> bytes:
        return blake2b(f"{session_id}\0{replica_id}".encode(), digest_size=8).digest()

    return sorted(replica_ids, key=weight, reverse=True)
