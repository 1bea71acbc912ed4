"""`/metrics` in Prometheus' text format, the same from every router.

Sources: the controller; vLLM's metrics of each replica, labelled `replica`; Ray's agent on each node for our
processes (`deployments.serve.instruments`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import ACCEPTED, DRAFTED, DRAFTING_OFF, FleetStatus, ReplicaLoad
from deployments.router.scrape import Scraped

OWN = "ray_slipstream_"
Read = Callable[[str], Iterable[Metric]]
_KEPT_LABELS = {"WorkerId": "process"}
_RAYS_LABELS = {"Component", "NodeAddress", "SessionName", "Version", "JobId"}  # the same everywhere, or long


def exposition(fleet: FleetStatus, rounds: Sequence[RoundReport], scraped: Scraped) -> str:
    """Merge all sources. `slipstream_..._metrics_up` is 0 for a source that did not respond."""
    families = _Families()
    _fleet(families, fleet)
    _last_round(families, rounds)
    known = dict.fromkeys(member.replica_id for member in fleet.members if member.state != "fenced")
    for name in known | dict.fromkeys(scraped.replicas):
        up = families.merge(scraped.replicas.get(name), replica=name)
        families.gauge("replica_metrics_up", "1 if the replica's own metrics are here", up, replica=name)
    for name, text in scraped.nodes.items():
        up = families.merge(text, read=_of_node)
        families.gauge("node_metrics_up", "1 if the metrics of this node's processes are here", up, node=name)
    registry = CollectorRegistry()
    registry.register(families)
    return generate_latest(registry).decode()


GENERATED, KV_CACHE = "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
LOAD = (GENERATED, RUNNING, WAITING, KV_CACHE, DRAFTED, ACCEPTED, DRAFTING_OFF)


def load_of(text: str) -> ReplicaLoad | None:
    """Sums its engines; None: unparsable."""
    found: dict[str, list[float]] = {name: [] for name in LOAD}
    versions: dict[str, dict[int, float]] = {DRAFTED: {}, ACCEPTED: {}}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in versions:
                    versions[sample.name][int(sample.labels.get("version", ""))] = sample.value
                found.get(sample.name, []).append(sample.value)
        return ReplicaLoad(
            generated_tokens=int(sum(found[GENERATED])),
            running=int(sum(found[RUNNING])),
            waiting=int(sum(found[WAITING])),
            kv_cache_use=max(found[KV_CACHE], default=0.0),
            drafted_tokens=int(_newest(versions[DRAFTED])),
            accepted_tokens=int(_newest(versions[ACCEPTED])),
            drafting_off=any(found[DRAFTING_OFF]),
        )
    except (ValueError, OverflowError):  # as `merge`; NaN and infinity are no counts
        return None


def _newest(by_version: Mapping[int, float]) -> float:
    return by_version[max(by_version)] if by_version else 0.0


class _Families(Collector):
    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(self, kind: Any, name: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        if name not in self._families:
            self._families[name] = kind(f"slipstream_{name}", text, labels=[*labels])
        family: Any = self._families[name]
        family.add_metric([*labels.values()], value)

    def merge(self, text: str | None, read: Read = text_string_to_metric_families, **labels: str) -> bool:
        """False: they conflict or cannot be parsed."""
        if text is None:
            return False
        try:
            theirs = list(read(text))
        except ValueError:
            return False
        if any(self._families.get(each.name, each).type != each.type for each in theirs):
            return False
        for each in theirs:
            family = self._families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
            family.samples += [
                Sample(s.name, {**s.labels, **labels}, s.value, s.timestamp) for s in each.samples
            ]
        return True


def _of_node(text: str) -> Iterator[Metric]:
    """Our families among an agent's megabyte of metrics, without Ray's prefix."""
    starts = tuple(f"{start}{OWN}" for start in ("", "# HELP ", "# TYPE "))
    wanted = "".join(line for line in text.splitlines(keepends=True) if line.startswith(starts))
    for family in text_string_to_metric_families(wanted):
        family.name = family.name.removeprefix("ray_")
        family.samples = [
            Sample(s.name.removeprefix("ray_"), _own_labels(s.labels), s.value, s.timestamp)
            for s in family.samples
        ]
        yield family


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {
        _KEPT_LABELS.get(name, name): value[:12] if name in _KEPT_LABELS else value
        for name, value in labels.items()
        if name not in _RAYS_LABELS and not name.startswith("otel_")
    }


def _fleet(families: _Families, fleet: FleetStatus) -> None:
    gauge = families.gauge
    gauge("weight_version", "version that the fleet has committed", fleet.committed_version)
    stored = 0 if fleet.stored_version is None else fleet.stored_version
    gauge("stored_weight_version", "newest version in the store, which late joiners load", stored)
    gauge("epoch", "number of the membership", fleet.epoch)
    for member in fleet.members:
        name = member.replica_id
        gauge("replica_weight_version", "version of one replica", member.version, replica=name)
        gauge("replica_serving", "1 if it takes requests", member.state == "serving", replica=name)
    for outcome, count in fleet.rounds_ended.items():
        families.counter("rounds", "rounds of this fleet, by how they ended", count, outcome=outcome)


def _last_round(families: _Families, rounds: Sequence[RoundReport]) -> None:
    committed = [report for report in rounds if report.phase == "committed"]
    if not committed:
        return
    last, gauge = committed[-1], families.gauge
    gauge("last_round_duration_seconds", "the last committed round", last.duration_s)
    for name, timings in last.replicas.items():
        gauge("last_round_gap_seconds", "pause of one replica", timings.gap_s, replica=name)
        gauge("last_round_stage_seconds", "staging of one replica", timings.stage_s, replica=name)
    for name, deviation in last.proof.items():
        gauge("proof_mean_difference", "of a replica's log-probabilities", deviation.mean, replica=name)
        gauge("proof_worst_difference", "of a replica's log-probabilities", deviation.worst, replica=name)
