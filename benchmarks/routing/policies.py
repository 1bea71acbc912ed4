"""Policies of the router: ours, and models of others.

vllm-router 0.1.17 is a program in Rust: its Python package has `PolicyType` and `Router.start`, and no call
that chooses a replica. Its policies are modelled here from its documentation (docs/load_balancing), with the
defaults of that package (`router_args.py`), and with an exact index where it has an approximate tree.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol

from deployments.protocol.routing import Demand
from deployments.router.affinity import BLOCK_ENDS, Affinity, block_hashes
from deployments.router.replica_policy import Candidate, load_of, order_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as a router sees it."""

    body: bytes
    session: str | None


@dataclass(slots=True, kw_only=True)
class Known:
    """What a router knows of the replicas: what it has there itself, and what they have reported."""

    own: Counter[str]
    others: dict[str, int]  # as of their last report
    versions: dict[str, int]

    def load(self, replica_id: str) -> int:
        return self.own[replica_id] + self.others[replica_id]


class Policy(Protocol):
    """One router's way to choose a replica."""

    def __call__(self, asked: Asked, known: Known) -> str: ...

    def load(self, asked: Asked) -> int:
        """What a request adds to the load of its replica."""
        return 1


class RoundRobin(Policy):
    def __init__(self, rng: random.Random) -> None:
        self._next = rng.randrange(1 << 16)

    def __call__(self, asked: Asked, known: Known) -> str:
        self._next += 1
        return list(known.others)[self._next % len(known.others)]


class PowerOfTwo(Policy):
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, asked: Asked, known: Known) -> str:
        return min(self._rng.sample(list(known.others), 2), key=known.load)


class ConsistentHash(Policy):
    """vllm-router's `consistent_hash`: a ring with 160 points a replica; by session, else by the body."""

    def __init__(self, rng: random.Random) -> None:
        self._ring: list[tuple[int, str]] = []

    def __call__(self, asked: Asked, known: Known) -> str:
        if not self._ring:
            self._ring = sorted(
                (_point(f"{each}-{number}".encode()), each) for each in known.others for number in range(160)
            )
        at = _point(asked.body if asked.session is None else asked.session.encode())
        return next((each for point, each in self._ring if point >= at), self._ring[0][1])


class CacheAware(Policy):
    """vllm-router's `cache_aware`: the longest prefix, unless loads are imbalanced."""

    threshold = 0.3
    absolute, relative = 64, 1.5
    budget = 1 << 25  # characters of each replica's tree

    def __init__(self, rng: random.Random) -> None:
        self._trees: dict[str, OrderedDict[int, int]] = {}  # sizes by block
        self._sizes: Counter[str] = Counter()

    def __call__(self, asked: Asked, known: Known) -> str:
        loads = {each: known.load(each) for each in known.others}
        blocks = block_hashes(asked.body)
        least, most = min(loads.values()), max(loads.values())
        if most - least > self.absolute and most > least * self.relative:
            chosen = min(loads, key=loads.__getitem__)
        else:
            matched = {each: self._matched(each, blocks) for each in loads}
            chosen = max(matched, key=matched.__getitem__)
            if not blocks or matched[chosen] / BLOCK_ENDS[len(blocks) - 1] <= self.threshold:
                chosen = min(loads, key=lambda each: self._sizes[each])
        self._insert(chosen, blocks)
        return chosen

    def _matched(self, replica_id: str, blocks: Sequence[int]) -> int:
        tree = self._trees.get(replica_id, OrderedDict())
        matched = 0
        for block, end in zip(blocks, BLOCK_ENDS, strict=False):
            if block not in tree:
                break
            matched = end
        return matched

    def _insert(self, replica_id: str, blocks: Sequence[int]) -> None:
        tree = self._trees.setdefault(replica_id, OrderedDict())
        begin = 0
        for block, end in zip(blocks, BLOCK_ENDS, strict=False):
            if block not in tree:
                tree[block] = end - begin
                self._sizes[replica_id] += end - begin
            tree.move_to_end(block)
            begin = end
        while self._sizes[replica_id] > self.budget:
            self._sizes[replica_id] -= tree.popitem(last=False)[1]


class Ours(Policy):
    """The router's own policy and memory."""

    def __init__(self, rng: random.Random, load_factor: float = 1.25) -> None:
        self._rng = rng
        self._load_factor = load_factor
        self._affinity = Affinity()

    def load(self, asked: Asked) -> int:
        return load_of(1, asked.body)

    def __call__(self, asked: Asked, known: Known) -> str:
        blocks = block_hashes(asked.body)
        candidates = [
            Candidate(
                replica_id=each,
                version=known.versions[each],
                admitted=True,
                in_flight=known.others[each],
            )
            for each in known.others
        ]
        demand = Demand(
            session_id=asked.session,
            home=self._affinity.home(asked.session),
            holders=partial(self._affinity.holders, blocks),
            in_flight=known.own,
            load_factor=self._load_factor,
        )
        chosen = order_candidates(candidates, demand, self._rng.sample)[0][0]
        self._affinity.sent(chosen, known.versions[chosen], session_id=asked.session, blocks=blocks)
        return chosen


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "vllm-router consistent_hash": ConsistentHash,
    "vllm-router cache_aware": CacheAware,
    "Slipstream": Ours,
}


def _point(value: bytes) -> int:
    return int.from_bytes(blake2b(value, digest_size=8).digest())
