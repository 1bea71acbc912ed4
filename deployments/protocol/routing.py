"""Headers, demands and endpoints of requests between clients, routers and replicas."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deployments.protocol.errors import InvalidRequest

KEY_HEADER = b"x-slipstream-key"  # proves that a router belongs to the fleet
REFUSED_HEADER = b"x-slipstream-refused"  # another replica may answer; NOT_BEGUN or LOST
NOT_BEGUN = b"not-begun"  # the request did not reach the engine, or the replica is being stopped
ERROR_EVENTS = (b'data: {"error"', b"event: error\n")  # how error events begin: vLLM's, and replicas' own
LOST = b"lost"  # the engine had the request when it failed
PART_HEADER = b"x-slipstream-part"  # the request is a part of a client's; see `Part`
ROUTER_HEADER = b"x-slipstream-router"  # the sending router, and what the request adds to the load
MAX_SESSION_ID = 256
Default = TypeVar("Default", float, None)
MAX_NUMBER = 10**9  # versions, and seconds (thirty years)


# Serve carries these from a replica to every router, as dicts: `record_replica_metadata` once the replica is
# ready, `record_routing_stats` every `request_routing_stats_period_s`.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    address: str  # host:port
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """The replica state that the routing policy reads; the defaults hold until the first report."""

    version: int = 0
    admitted: bool = True
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Census:
    """The replicas that Serve knows; choosing one fills it in."""

    loads: dict[str, int] = field(default_factory=dict)  # replicas that may answer the request
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)  # replica -> `ReplicaEndpoint`


@dataclass(slots=True)
class Choice:
    """Choosing a replica fills it in: its version in the routing statistics."""

    version: int = 0


def no_holders(version: int) -> Iterable[tuple[int, Sequence[str]]]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request requires of its replica. `census` and `choice` are filled in by the choice."""

    min_version: int = 0  # the oldest acceptable weights
    timeout_s: float = 0.0  # how long to wait for them
    session_id: str | None = None  # a session stays on one replica unless that is overloaded
    stays: bool = False  # only the session's replica can answer, whatever its load
    home: str | None = None  # the replica that the session was sent to last
    # Replicas by the bytes of the prompt that they have cached at a version, most first.
    holders: Callable[[int], Iterable[tuple[int, Sequence[str]]]] = no_holders
    refused: tuple[str, ...] = ()  # replicas that refused this request come last
    router: str = ""
    in_flight: Mapping[str, int] = field(default_factory=dict)  # replica -> the router's load there
    prefer: str | None = None  # the replica that this part of a split request is meant for
    load_factor: float = 1000.0  # sessions and prefixes leave a replica at this multiple of the mean load
    census: Census | None = None
    choice: Choice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a split request: what its response shares with those of the other parts."""

    first_choice: int  # an index into the whole response
    created: int  # seconds since 1970, the same for all parts

    def header(self) -> str:
        return f"{self.first_choice},{self.created}"


def router_header(router: str, load: int) -> str:
    return f"{router},{load}"


def router_of(value: bytes | None) -> tuple[str, int]:
    """From a `ROUTER_HEADER`; without one the load is 1."""
    if value is None:
        return "", 1
    router, load = value.decode().split(",")
    return router, int(load)


def part_of(value: bytes | None) -> Part | None:
    """None: the request is whole."""
    if value is None:
        return None
    first_choice, created = value.split(b",")
    return Part(first_choice=int(first_choice), created=int(created))


DEMANDS = ("x-min-weight-version", "x-weight-timeout", "x-session-id")


def demand_of(headers: Mapping[str, str], weight_timeout_s: float) -> Demand:
    """Raises InvalidRequest: a header is not a number in its range."""
    session_id = headers.get("x-session-id")
    if session_id is not None and len(session_id) > MAX_SESSION_ID:
        raise InvalidRequest(
            f"x-session-id must have at most {MAX_SESSION_ID} characters, got {len(session_id)}"
        )
    return Demand(
        min_version=int(number_of(headers, "x-min-weight-version", 0, whole=True)),
        timeout_s=number_of(headers, "x-weight-timeout", weight_timeout_s),
        session_id=session_id,
    )


def number_of(
    headers: Mapping[str, str], name: str, default: Default, *, most: int = MAX_NUMBER, whole: bool = False
) -> float | Default:
    """Raises InvalidRequest: the header is not a number from 0 to `most`."""
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or (whole and not value.is_integer()):
        raise InvalidRequest(f"{name} must be a number from 0 to {most:,}, got {text[:40]!r}")
    return value
