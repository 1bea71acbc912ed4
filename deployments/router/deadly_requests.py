"""Which requests are refused because replicas were lost under them: pure, without Ray and HTTP.

A request can end the engine that computes it, and would end every engine that it is sent to. The router
cannot tell it from the requests that happened to run beside it, so every request that was under way when its
replica was lost is tried once more. After a second loss it is refused, and so are its repetitions: clients
repeat what fails. A stream that was cut off is tried again by its client alone, so what it cost is remembered
until it comes again. Each router replica has a memory of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TypeVar

from deployments.protocol.errors import DeadlyRequest

MAX_LOSSES = 2  # of replicas under one request
REFUSED_FOR_S = 600.0
MAX_REMEMBERED = 4096  # requests; the oldest is forgotten first

Value = TypeVar("Value")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutOff:
    replicas: frozenset[str]
    until: float


class DeadlyRequests:
    """The requests that a router replica refuses, each for `REFUSED_FOR_S`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}  # by digest; the oldest first
        self._cut_off: dict[bytes, _CutOff] = {}  # likewise

    def __len__(self) -> int:
        return len(self._until) + len(self._cut_off)

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
            replicas: all that were lost under it since it came, in their order.

        Raises:
            DeadlyRequest: it was the last one that this request may cost.
        """
        replicas = [*(self._cost(request) - {*replicas}), *replicas]
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

    def cut_off(self, request: RequestIdentity, replica: str) -> bool:
        """A replica was lost in the middle of its answer.

        Returns:
            Whether the request is refused from now on: it was the last replica that it may cost.
        """
        if not request.body:  # as in `lost`
            return False
        replicas = self._cost(request) | {replica}
        if len(replicas) >= MAX_LOSSES:
            self._remember(request.digest)
            return True
        now = self._clock()
        self._cut_off.pop(request.digest, None)
        self._cut_off[request.digest] = _CutOff(replicas=replicas, until=now + REFUSED_FOR_S)
        _bound(self._cut_off, lambda each: each.until > now)
        return False

    def _cost(self, request: RequestIdentity) -> frozenset[str]:
        """The replicas that were lost in the middle of answers to it, not long ago."""
        found = self._cut_off.get(request.digest) if self._cut_off else None
        return found.replicas if found is not None and found.until > self._clock() else frozenset()

    def _remember(self, digest: bytes) -> None:
        now = self._clock()
        self._cut_off.pop(digest, None)
        self._until.pop(digest, None)  # remembered anew, it is the youngest
        self._until[digest] = now + REFUSED_FOR_S
        _bound(self._until, lambda until: until > now)


def _bound(remembered: dict[bytes, Value], counts: Callable[[Value], bool]) -> None:
    """Forget what does not count any more, and the oldest beyond `MAX_REMEMBERED`."""
    for oldest, value in list(remembered.items()):
        if counts(value) and len(remembered) <= MAX_REMEMBERED:
            break
        del remembered[oldest]
