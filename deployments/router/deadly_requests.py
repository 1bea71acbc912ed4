"""Which requests are refused because replicas were lost under them: pure, without Ray and HTTP.

A request can end the engine that computes it, and would end every engine that it is sent to. The router
cannot tell it from the requests that happened to run beside it, so every request that was under way when its
replica was lost is tried once more. After a second loss it is refused, and so are its repetitions: clients
repeat what fails. Each router replica has a memory of its own.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b

from deployments.errors import DeadlyRequest

MAX_LOSSES = 2  # of replicas under one request
REFUSED_FOR_S = 600.0
MAX_REMEMBERED = 4096  # requests; the oldest is forgotten first


class RequestIdentity:
    """What a request and its repetition have in common."""

    def __init__(self, method: str, path: str, body: bytes) -> None:
        self.method = method
        self.path = path
        self.body = body

    @cached_property
    def digest(self) -> bytes:
        """Computed when it is first needed: only a router that remembers something reads whole bodies."""
        digest = blake2b(f"{self.method}\0{self.path}\0".encode(), digest_size=16)
        digest.update(self.body)
        return digest.digest()


class DeadlyRequests:
    """The requests that a router replica refuses, each for `REFUSED_FOR_S`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}  # by digest; the oldest first

    def __len__(self) -> int:
        return len(self._until)

    def check(self, request: RequestIdentity) -> None:
        """Before a request is sent to a replica.

        Raises:
            DeadlyRequest: it is refused.
        """
        if not self._until:
            return
        left_s = self._until.get(request.digest, 0.0) - self._clock()
        if left_s > 0:
            raise DeadlyRequest(
                f"replicas were lost under this request; it is refused for {left_s:.0f} s: do not repeat it",
                {"refused_for_s": left_s},
            )

    def lost(self, request: RequestIdentity, replicas: Sequence[str]) -> None:
        """A replica was lost under a request; returns if the request may be tried again.

        Args:
            replicas: all that were lost under it, in their order.

        Raises:
            DeadlyRequest: it was the last one that this request may cost.
        """
        if len(replicas) < MAX_LOSSES:
            return
        # A request without a body is the same for everybody: remembered, it would close a route.
        refused_for_s = REFUSED_FOR_S if request.body else 0.0
        if refused_for_s:
            self._remember(request.digest)
        names = ", ".join(replicas)
        raise DeadlyRequest(
            f"{len(replicas)} replicas were lost under this request ({names}): do not repeat it",
            {"replicas": list(replicas), "refused_for_s": refused_for_s},
        )

    def _remember(self, digest: bytes) -> None:
        now = self._clock()
        self._until.pop(digest, None)  # remembered anew, it is the youngest
        self._until[digest] = now + REFUSED_FOR_S
        for oldest, until in list(self._until.items()):
            if until > now and len(self._until) <= MAX_REMEMBERED:
                break
            del self._until[oldest]
