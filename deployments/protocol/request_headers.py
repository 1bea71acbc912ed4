"""The headers that clients, routers and replicas exchange, and what a request demands of a replica."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.protocol.errors import InvalidRequest

KEY_HEADER = b"x-slipstream-key"  # a router proves that it belongs to the fleet
REFUSED_HEADER = b"x-slipstream-refused"  # another replica may answer; one of the two values below
NOT_BEGUN = b"not-begun"  # the request did not reach the engine, or the replica is being stopped
MAX_SESSION_ID = 256
MAX_NUMBER = 10**9  # of a version; and of seconds, which is thirty years
LOST = b"lost"  # the engine had the request when it failed
PART_HEADER = b"x-slipstream-part"  # the request is a part of a client's; see `Part`
ROUTER_HEADER = b"x-slipstream-router"  # which router sent the request, and what it adds to the load


@dataclass(slots=True)
class Census:
    """The replicas that Serve knows: filled in by the choice of one of them.

    Attributes:
        loads: of each replica that may answer the request.
        metadata: of all, as `ReplicaEndpoint` has it.
    """

    loads: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Choice:
    """Filled in by the choice of a replica: the version of its weights, as of its routing statistics."""

    version: int = 0


def no_holders(version: int) -> Iterable[tuple[int, Sequence[str]]]:
    """No replica has anything of the prompt."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of the replica that answers it.

    Attributes:
        min_version: the oldest weights that may answer.
        timeout_s: how long to wait for them.
        session_id: requests of one session stay on one replica, unless that has too much to do.
        stays: the session's replica has something that no other one has: its load does not matter.
        home: the replica that the session was sent to last.
        holders: which replicas have how many bytes of the prompt cached at a version; the most first.
        refused: replicas that have refused this request already; they are asked last.
        router: the id of the asking router.
        in_flight: load that it has at each replica.
        prefer: the replica that this part of a split request is meant for.
        load_factor: before a replica has so many times the mean load, sessions and prefixes go elsewhere.
        census: to be filled in.
        choice: to be filled in.
    """

    min_version: int = 0
    timeout_s: float = 0.0
    session_id: str | None = None
    stays: bool = False
    home: str | None = None
    holders: Callable[[int], Iterable[tuple[int, Sequence[str]]]] = no_holders
    refused: tuple[str, ...] = ()
    router: str = ""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    prefer: str | None = None
    load_factor: float = 1000.0
    census: Census | None = None
    choice: Choice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a split request: what its answer has in common with those of the other parts.

    Attributes:
        first_choice: the index of its first choice in the whole answer.
        created: of all parts, in seconds since 1970.
    """

    first_choice: int
    created: int

    def header(self) -> str:
        """The value of `PART_HEADER`."""
        return f"{self.first_choice},{self.created}"


def router_header(router: str, load: int) -> str:
    """The value of `ROUTER_HEADER`."""
    return f"{router},{load}"


def router_of(value: bytes | None) -> tuple[str, int]:
    """The router and the load that a `ROUTER_HEADER` names; a request without one is one."""
    if value is None:
        return "", 1
    router, load = value.decode().split(",")
    return router, int(load)


def part_of(value: bytes | None) -> Part | None:
    """The part that a router's `PART_HEADER` names; None: the request is whole."""
    if value is None:
        return None
    first_choice, created = value.split(b",")
    return Part(first_choice=int(first_choice), created=int(created))


def demand_of(headers: Mapping[str, str], weight_timeout_s: float) -> Demand:
    """What the request's headers ask of the weights.

    Raises:
        InvalidRequest: a header is not a number in its range.
    """
    return Demand(
        min_version=int(_number(headers, "x-min-weight-version", 0)),
        timeout_s=_number(headers, "x-weight-timeout", weight_timeout_s),
        session_id=_session(headers.get("x-session-id")),
    )


def _session(given: str | None) -> str | None:
    if given is not None and len(given) > MAX_SESSION_ID:
        raise InvalidRequest(f"x-session-id must have at most {MAX_SESSION_ID} characters, got {len(given)}")
    return given


def _number(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_NUMBER or (name == "x-min-weight-version" and not value.is_integer()):
        raise InvalidRequest(f"{name} must be a number from 0 to {MAX_NUMBER:,}, got {text[:40]!r}")
    return value
