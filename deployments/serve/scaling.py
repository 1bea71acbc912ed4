"""How many replicas the fleet should have: what each replica reports, and the policy that decides.

    replica              record_autoscaling_stats ─► ScalingStats, with what the operator wants
    Serve's controller   FleetScaling(context)    ─► the number of replicas that Serve starts or stops towards

Requests go past Serve's own counters, so the load is what vLLM's scheduler says. What the operator wants is
kept in our controller's journal alone, and reaches the policy with the reports.

Serve pickles this module by value into its own controller, where our code need not be installed: it imports
the standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

SETTLED = 0.75  # after a replica has gone, the others' load is at most this share of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStats:
    """What one replica reports: numbers only, as Serve demands."""

    running: float  # requests in vLLM's batch, over all data-parallel ranks
    waiting: float  # requests that vLLM has no place for
    places: float  # that the batch has at most
    kv_use: float  # share of the KV cache's blocks in use, 0 to 1
    halted: float = 0.0  # 1: paused or asleep, so that its load says nothing
    wanted: float = 0.0  # replicas that the operator wants; 0: as many as the load needs
    wanted_number: float = 0.0  # increases with every change of `wanted`

    @property
    def demand(self) -> float:
        """How many full replicas its requests would occupy."""
        requests = self.running + self.waiting
        # What waits needs as much of the cache as what runs.
        cache = self.kv_use * (requests / self.running) if self.running else 0.0
        return max(requests / max(self.places, 1.0), cache)


class FleetScaling:
    """Serve's autoscaling policy of the rollout deployment.

    The operator's number holds as it is. Without one the load decides: more replicas once the load has been
    above `target_load` for `up_s`, fewer once it would have fitted on fewer for `down_s`.

    Args:
        least, most: bounds of the load's number, and of the operator's.
        target_load: how full a replica should be at most, 0 to 1.
    """

    def __init__(self, *, least: int, most: int, target_load: float, up_s: float, down_s: float) -> None:
        self._least = least
        self._most = most
        self._target_load = target_load
        self._up_s = up_s
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
        """The number of replicas, and the state for the next decision.

        Args:
            reports: the newest of each running replica; none: nothing is known, and nothing changes.
            target: the number that Serve has been told last.
            now: seconds.
        """
        if not reports:
            return target, dict(state)
        wanted = int(max(reports, key=lambda each: each.wanted_number).wanted)
        if wanted:
            return self._bounded(wanted), {}
        if any(each.halted for each in reports):
            return target, dict(state)  # its load says nothing
        demand = sum(each.demand for each in reports) / self._target_load
        return self._by_load(demand, target, now, state)

    def _by_load(
        self, demand: float, target: int, now: float, state: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        more, fewer = self._bounded(math.ceil(demand)), self._bounded(math.ceil(demand / SETTLED))
        since = state.get("since", now)
        above_since = state.get("above_since", now) if more > target else None
        if now - state.get("seen", now) > self._up_s:  # the fleet stood still meanwhile
            above_since = now if more > target else None
        recent = _remember(state.get("recent", ()), fewer, now, self._down_s)
        decided = self._bounded(target)
        if above_since is not None and now - above_since >= self._up_s:
            decided, above_since = more, None
        elif now - since >= self._down_s:
            decided = min(decided, max(count for _, count in recent))
        kept: dict[str, Any] = {"since": since, "seen": now, "recent": recent}
        return decided, kept if above_since is None else {**kept, "above_since": above_since}

    def _bounded(self, count: int) -> int:
        return max(self._least, min(self._most, count))


def latest(series: Mapping[str, Mapping[Any, Sequence[Any]]] | None) -> list[ScalingStats]:
    """The newest report of each replica, from Serve's time series by metric and replica."""
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
