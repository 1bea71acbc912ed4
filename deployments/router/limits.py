"""The limits of one router replica."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """What a router admits and how long it waits; the settings are in `RouterConfig`."""

    max_in_flight: int  # requests of clients; one that is split has one place
    max_body_bytes: int
    max_sequences: int  # of one request: prompts times answers to each
    find_replica_timeout_s: float  # how long a request looks for a replica; generating is not looking
    weight_timeout_s: float  # how long it waits for a version, without x-weight-timeout
    load_factor: float  # times the mean load, above which a replica gets no sessions and prefixes of its own
    prefix_affinity: bool  # requests without a session go where the beginning of their prompt is cached

    def with_settings(self, settings: Mapping[str, float]) -> "RouterLimits":
        """The same with what a live fleet may change, by the names of the settings."""
        return replace(
            self,
            max_in_flight=int(settings["max_ongoing_requests"]),
            find_replica_timeout_s=settings["request_timeout_s"],
            weight_timeout_s=settings["request_timeout_s"],
            load_factor=settings["load_factor"],
            prefix_affinity=bool(settings["prefix_affinity"]),
        )
