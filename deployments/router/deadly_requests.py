"""Quarantines requests under which replicas crashed.

A request can crash every engine that computes it. Requests that ran beside it look the same, so each is
retried once. After a second loss it is refused for `REFUSED_FOR_S`, since clients retry failures. Only the
client can retry a broken stream, so its loss is remembered.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from deployments.protocol.errors import DeadlyRequest

MAX_LOSSES = 2  # replicas lost under one request
REFUSED_FOR_S = 600.0
MAX_REMEMBERED = 4096  # requests; the oldest is evicted first


class RequestIdentity:
    def __init__(self, method: str, path: str, body: bytes) -> None:
        self.method = method
        self.path = path
        self.body = body

    @cached_property
    def digest(self) -> bytes:
        digest = blake2b(f"{self.method}\0{self.path}\0".encode(), digest_size=16)
        digest.update(self.body)
        return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    replicas: frozenset[str]
    refused: bool
    until: float


class DeadlyRequests:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._remembered: dict[bytes, _Remembered] = {}

    def __len__(self) -> int:
        return len(self._remembered)

    def check(self, request: RequestIdentity) -> None:
        found = self._find(request)
        if found is not None and found.refused:
            left_s = found.until - self._clock()
            raise DeadlyRequest(
                f"replicas were lost under this request; it is refused for {left_s:.0f} s: do not repeat it",
                {"refused_for_s": left_s},
            )

    def lost(self, request: RequestIdentity, replicas: Sequence[str]) -> None:
        """Returns if the request may be retried. Raises DeadlyRequest."""
        replicas = [*(self._cut_off_replicas(request) - {*replicas}), *replicas]
        if len(replicas) < MAX_LOSSES:
            return
        # Requests without a body are alike; quarantining one would close a route.
        refused_for_s = REFUSED_FOR_S if request.body else 0.0
        if refused_for_s:
            self._remember(request, frozenset(replicas), refused=True)
        names = ", ".join(replicas)
        raise DeadlyRequest(
            f"{len(replicas)} replicas were lost under this request ({names}): do not repeat it",
            {"replicas": list(replicas), "refused_for_s": refused_for_s},
        )

    def cut_off(self, request: RequestIdentity, replica: str) -> bool:
        """Returns whether the request is refused now."""
        if not request.body:
            return False
        replicas = self._cut_off_replicas(request) | {replica}
        refused = len(replicas) >= MAX_LOSSES
        self._remember(request, replicas, refused=refused)
        return refused

    def survived(self, request: RequestIdentity) -> None:
        """Forget the replica lost during the response: another one completed it."""
        found = self._find(request)
        if found is not None and not found.refused:
            del self._remembered[request.digest]

    def _cut_off_replicas(self, request: RequestIdentity) -> frozenset[str]:
        found = self._find(request)
        return frozenset() if found is None or found.refused else found.replicas

    def _find(self, request: RequestIdentity) -> _Remembered | None:
        found = self._remembered.get(request.digest) if self._remembered else None
        return found if found is not None and found.until > self._clock() else None

    def _remember(self, request: RequestIdentity, replicas: frozenset[str], *, refused: bool) -> None:
        now = self._clock()
        self._remembered.pop(request.digest, None)
        self._remembered[request.digest] = _Remembered(
            replicas=replicas, refused=refused, until=now + REFUSED_FOR_S
        )
        while True:
            digest, oldest = next(iter(self._remembered.items()))
            if oldest.until > now and len(self._remembered) <= MAX_REMEMBERED:
                return
            del self._remembered[digest]
