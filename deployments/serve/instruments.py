"""Our processes' metrics. Ray's agent on each node collects them; `/metrics` drops Ray's prefix.

A process starts at zero; the label `process` separates processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from ray.util.metrics import Counter, Gauge, Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    name: str
    kind: type[Counter | Gauge | Histogram]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        return f"{self.name}_total" if self.kind is Counter else self.name

    @property
    def series(self) -> list[str]:
        if self.kind is Histogram:
            return [f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count")]
        return [self.family]


_ROUND_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

ROUND = OwnMetric(
    name="slipstream_round_seconds",
    kind=Histogram,
    text="rounds that ended, from their opening",
    labels=("outcome",),
    buckets=_ROUND_S,
)
ROUND_PART = OwnMetric(
    name="slipstream_round_part_seconds",
    kind=Histogram,
    text="what committed rounds waited for",
    labels=("part",),
    buckets=_ROUND_S,
)
ROUND_GAP = OwnMetric(
    name="slipstream_round_gap_seconds",
    kind=Histogram,
    text="pause of each replica in each committed round",
    buckets=_GAP_S,
)
FENCES = OwnMetric(
    name="slipstream_fences", kind=Counter, text="replicas that were fenced", labels=("reason",)
)
REQUESTS = OwnMetric(
    name="slipstream_router_requests",
    kind=Counter,
    text="requests of a router that ended, by outcome",
    labels=("outcome",),
)
REROUTED = OwnMetric(
    name="slipstream_router_rerouted",
    kind=Counter,
    text="attempts after which a request went to another replica",
    labels=("reason",),
)
WAITED = OwnMetric(name="slipstream_router_waited", kind=Counter, text="requests that waited for a replica")
WAITED_SECONDS = OwnMetric(
    name="slipstream_router_waited_seconds", kind=Counter, text="how long requests waited for a replica"
)
STEPS = OwnMetric(name="slipstream_trainer_steps", kind=Counter, text="optimizer steps")
STEP = OwnMetric(
    name="slipstream_step",
    kind=Gauge,
    text="figures of the last step, the trainer's own and those that its job reports",
    labels=("source", "figure"),
)
OWN = (ROUND, ROUND_PART, ROUND_GAP, FENCES, REQUESTS, REROUTED, WAITED, WAITED_SECONDS, STEPS, STEP)


class Record(Protocol):
    def __call__(self, metric: OwnMetric, value: float = 1.0, /, **labels: str) -> None:
        """Add to a counter, set a gauge, observe for a histogram."""


def record(metric: OwnMetric, value: float = 1.0, /, **labels: str) -> None:
    instrument = _instrument(metric)
    tags: Mapping[str, str] = labels
    if isinstance(instrument, Counter):
        if value > 0:
            instrument.inc(value, tags)
    elif isinstance(instrument, Gauge):
        instrument.set(value, tags)
    else:
        instrument.observe(value, tags)


@cache
def _instrument(metric: OwnMetric) -> Counter | Gauge | Histogram:
    options: dict[str, Any] = {"boundaries": [*metric.buckets]} if metric.kind is Histogram else {}
    return metric.kind(metric.name, metric.text, tag_keys=metric.labels, **options)
