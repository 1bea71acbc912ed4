"""Chooses a replica for a request. Replicas check version and admission finally."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from deployments.protocol.routing import Demand

# A long prompt costs prefill, and KV reads in each step: benchmarks.routing.
LONG_PROMPT_BYTES = 32 << 10
MAX_LONG_PROMPTS = 8  # per body: images are long and take few tokens


def load_of(sequences: int, body: bytes) -> int:
    return sequences + min(len(body) // LONG_PROMPT_BYTES, MAX_LONG_PROMPTS)


LOAD_FACTOR = 1.25  # sessions and prefixes leave a replica at this multiple of the mean load
FREE_LOAD = 8  # never overloaded below: a decoding step takes as long as for one sequence
BYTES_PER_LOAD = 1000  # cached bytes of a prompt that outweigh one load: benchmarks.routing
MAX_PREFIXES = 2  # lengths of cached prefixes that are compared
Sample = Callable[[Sequence[str], int], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    replica_id: str
    version: int
    admitted: bool
    in_flight: int = 0


def eligible_loads(candidates: Sequence[Candidate], demand: Demand) -> dict[str, int]:
    """Includes replicas behind the demanded version: else all prompts would go to the first updated one."""
    return {
        candidate.replica_id: _load(candidate, demand)
        for candidate in candidates
        if candidate.admitted and candidate.replica_id not in demand.refused
    }


def order_candidates(
    candidates: Sequence[Candidate], demand: Demand, sample: Sample = random.sample
) -> list[list[str]]:
    """Groups of at most two replica ids, in the order to try.

    Admitted replicas only: the preferred one, unless it refused; those at the demanded version; those that
    may reach it in time; those that refused.
    """
    groups: dict[tuple[bool, bool], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.admitted:
            kind = candidate.replica_id in demand.refused, candidate.version < demand.min_version
            groups.setdefault(kind, []).append(candidate)
    ordered = [_best(group, demand, sample) for _, group in sorted(groups.items())]
    preferred = demand.prefer
    if preferred is not None and preferred in eligible_loads(candidates, demand):
        return [[preferred], *ordered]
    return ordered


def _best(group: Sequence[Candidate], demand: Demand, sample: Sample) -> list[str]:
    """The replica to try among equals, or two, the better first.

    A session stays where it is. Without a replica, or if it is overloaded, rendezvous hashing decides, so
    that all routers agree. Else compare holders of the longest cached prefixes and two random replicas by
    load minus saved prefill.

    Sources: Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates"; Mirrokni et al.
    2016, "Consistent Hashing with Bounded Loads"; Mitzenmacher 2001, "The Power of Two Choices in Randomized
    Load Balancing".
    """
    load = {candidate.replica_id: _load(candidate, demand) for candidate in group}
    if len(load) == 1:
        return list(load)
    session = demand.session_id
    if session is not None and demand.stays:
        return [_by_rendezvous(load, session)]
    free = _not_too_loaded(load, demand)
    if session is not None:
        return [demand.home if demand.home in free else _by_rendezvous(free, session)]
    saved = dict.fromkeys(sample(free, min(2, len(free))), 0)
    version = max(each.version for each in group)
    saved |= _holders(demand.holders(version), free, sample)
    return sorted(saved, key=lambda each: load[each] - saved[each] / BYTES_PER_LOAD)[:2]


def _not_too_loaded(load: Mapping[str, int], demand: Demand) -> list[str]:
    """Replicas below `load_factor` times the mean load; never empty."""
    most = max(FREE_LOAD, demand.load_factor * sum(load.values()) / len(load))
    return [name for name, has in load.items() if has < most]


def _holders(
    holders: Iterable[tuple[int, Sequence[str]]], free: Collection[str], sample: Sample
) -> dict[str, int]:
    """One or two free holders of each of the longest prefixes, and the prefix's bytes."""
    found: dict[str, int] = {}
    lengths = 0
    may = set(free)
    for size_bytes, replica_ids in holders:
        allowed = [each for each in replica_ids if each in may]
        found |= dict.fromkeys(sample(allowed, min(2, len(allowed))), size_bytes)
        lengths += bool(allowed)
        if lengths == MAX_PREFIXES:
            break
    return found


def _load(candidate: Candidate, demand: Demand) -> int:
    return candidate.in_flight + demand.in_flight.get(candidate.replica_id, 0)


def _by_rendezvous(replica_ids: Collection[str], session_id: str) -> str:

    def weight(replica_id: str) -> bytes:
        return blake2b(f"{session_id}\0{replica_id}".encode(), digest_size=8).digest()

    return max(replica_ids, key=weight)
