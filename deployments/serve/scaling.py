"""How many replicas the fleet should have: Serve's autoscaling policy and the replicas' reports to it.

    replica              record_autoscaling_stats ─► ScalingStats, with the operator's number
    Serve's controller   FleetScaling(context)    ─► the number of replicas that Serve scales to

Requests bypass Serve's own counters, so the load is vLLM's scheduler's. Only our controller's journal keeps
the operator's number, which reaches the policy with the reports.

Serve pickles this module by value into its own controller, where our code may be missing: import the
standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

TARGET_LOAD = 0.8  # the share of a replica's `max_num_seqs`, or of its KV cache if that is fuller
UPSCALE_DELAY_S = 10.0  # how long a higher load must have lasted: a replica takes longer than that to start
SETTLED = 0.75  # after a replica is removed, the others' load is at most this share of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStats:
    """One replica's report: numbers only, as Serve demands."""

    running: float  # requests in vLLM's batch, over all data-parallel ranks
    waiting: float  # requests queued in vLLM
    places: float  # the batch's limit
    kv_use: float  # share of the KV cache's blocks in use, 0 to 1
    halted: float = 0.0  # 1: paused or asleep, so its load means nothing
    wanted: float = 0.0  # the operator's number of replicas; 0: as many as the load needs
    wanted_number: float = 0.0  # increases with every change of `wanted`

    @property
    def demand(self) -> float:
        """How many replicas its requests would fill."""
        requests = self.running + self.waiting
        # Waiting requests need as much cache as running ones.
        cache = self.kv_use * (requests / self.running) if self.running else 0.0
        return max(requests / max(self.places, 1.0), cache)


class FleetScaling:
    """Serve's autoscaling policy of the rollout deployment.

    The operator's number is followed at once. Without one: more replicas once the load has been above
    `TARGET_LOAD` for `UPSCALE_DELAY_S`, fewer once it would have fit on fewer for `down_s`.
    """

    def __init__(self, *, least: int, most: int, down_s: float) -> None:
        self._least = least
        self._most = most
        self._down_s = down_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's call, ten times a second. `context`: Serve's `AutoscalingContext`."""
        return self.decide(
            latest(context.raw_metrics),
            target=context.target_num_replicas,
            now=context.current_time,
            state=context.policy_state,
        )

    def decide(
        self, reports: Sequence[ScalingStats], *, target: int, now: float, state: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state for the next decision, from the newest reports and Serve's
        current target."""
        if not reports:
            return target, dict(state)
        wanted = int(max(reports, key=lambda each: each.wanted_number).wanted)
        if wanted:
            return self._bounded(wanted), {}
        if any(each.halted for each in reports):
            return target, dict(state)
        demand = sum(each.demand for each in reports) / TARGET_LOAD
        return self._by_load(demand, target, now, state)

    def _by_load(
        self, demand: float, target: int, now: float, state: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        more, fewer = self._bounded(math.ceil(demand)), self._bounded(math.ceil(demand / SETTLED))
        since = state.get("since", now)
        above_since = state.get("above_since", now) if more > target else None
        if now - state.get("seen", now) > UPSCALE_DELAY_S:  # the policy did not run meanwhile
            above_since = now if more > target else None
        recent = _remember(state.get("recent", ()), fewer, now, self._down_s)
        decided = self._bounded(target)
        if above_since is not None and now - above_since >= UPSCALE_DELAY_S:
            decided, above_since = more, None
        elif now - since >= self._down_s:
            decided = min(decided, max(count for _, count in recent))
        kept: dict[str, Any] = {"since": since, "seen": now, "recent": recent}
        return decided, kept if above_since is None else {**kept, "above_since": above_since}

    def _bounded(self, count: int) -> int:
        return max(self._least, min(self._most, count))


def latest(series: Mapping[str, Mapping[Any, Sequence[Any]]] | None) -> list[ScalingStats]:
    by_replica: dict[Any, dict[str, float]] = {}
    for name, replicas in (series or {}).items():
        for replica, points in replicas.items():
            if points:
                by_replica.setdefault(replica, {})[name] = points[-1].value
    names = {field.name for field in fields(ScalingStats)}
    return [
        ScalingStats(**{name: made[name] for name in names})
        for made in by_replica.values()
        if names <= made.keys()
    ]


def _remember(
    recent: Sequence[tuple[float, int]], count: int, now: float, span_s: float
) -> list[tuple[float, int]]:
    """The highest count of each second of the last `span_s`."""
    kept = [(at, each) for at, each in recent if now - at <= span_s]
    if kept and int(kept[-1][0]) == int(now):
        at, before = kept.pop()
        return [*kept, (at, max(before, count))]
    return [*kept, (now, count)]
