"""Serve's autoscaling policy, and the replicas' reports to it.

    replica              record_autoscaling_stats ─► ScalingStats, with the operator's number
    Serve's controller   FleetScaling(context)    ─► the number of replicas

Requests bypass Serve's counters, so the load comes from vLLM's scheduler. The operator's number, from our
controller's journal, travels with the reports.

Serve pickles this module by value into its controller: import the standard library only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

TARGET_LOAD = 0.8  # share of `max_num_seqs`, or of the KV cache if that is fuller
UPSCALE_DELAY_S = 10.0  # about what a replica takes to start
SETTLED = 0.75  # a replica goes only if the others then have at most this share of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStats:
    running: float
    waiting: float
    places: float
    kv_use: float  # used share of the KV cache, 0 to 1
    halted: float = 0.0  # 1: paused or asleep; its load is meaningless
    wanted: float = 0.0  # the operator's number of replicas; 0: follow the load
    wanted_number: float = 0.0

    @property
    def demand(self) -> float:
        requests = self.running + self.waiting
        # Waiting requests will need as much cache as running ones.
        cache = self.kv_use * (requests / self.running) if self.running else 0.0
        return max(requests / max(self.places, 1.0), cache)


class FleetScaling:
    """An operator's number applies at once. Else: scale up after the load exceeded `TARGET_LOAD` for
    `UPSCALE_DELAY_S`, down after it would have fit on fewer replicas for `down_s`."""

    def __init__(self, *, least: int, most: int, down_s: float) -> None:
        self._least = least
        self._most = most
        self._down_s = down_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        return self.decide(
            latest(context.raw_metrics),
            target=context.target_num_replicas,
            now=context.current_time,
            state=context.policy_state,
        )

    def decide(
        self, reports: Sequence[ScalingStats], *, target: int, now: float, state: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
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
    kept = [(at, each) for at, each in recent if now - at <= span_s]
    if kept and int(kept[-1][0]) == int(now):
        at, before = kept.pop()
        return [*kept, (at, max(before, count))]
    return [*kept, (now, count)]
