"""The fleet's state in Prometheus' text format."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from deployments.protocol.publishing import RoundReport
from deployments.protocol.status import FleetStatus


def exposition(fleet: FleetStatus, rounds: Sequence[RoundReport]) -> str:
    """Gauges of the fleet and of the last committed round of the history."""
    registry = CollectorRegistry()
    families: dict[str, Gauge] = {}

    def gauge(name: str, text: str, value: float, **labels: str) -> None:
        family = families.get(name)
        if family is None:
            family = Gauge(f"slipstream_{name}", text, sorted(labels), registry=registry)
            families[name] = family
        (family.labels(**labels) if labels else family).set(value)

    gauge("weight_version", "version that the fleet has committed", fleet.committed_version)
    stored = 0 if fleet.stored_version is None else fleet.stored_version
    gauge("stored_weight_version", "newest version in the store, which late joiners load", stored)
    gauge("epoch", "number of the membership", fleet.epoch)
    for member in fleet.members:
        name = member.replica_id
        gauge("replica_weight_version", "version of one replica", member.version, replica=name)
        gauge("replica_serving", "1 if it takes requests", member.state == "serving", replica=name)
    for phase in ("committed", "aborted"):
        ended = sum(report.phase == phase for report in rounds)
        gauge("rounds", "rounds in the history, by how they ended", ended, phase=phase)
    committed = [report for report in rounds if report.phase == "committed"]
    if committed:
        last = committed[-1]
        gauge("last_round_duration_seconds", "the last committed round", last.duration_s)
        for name, timings in last.replicas.items():
            gauge("last_round_gap_seconds", "pause of one replica", timings.gap_s, replica=name)
            gauge("last_round_stage_seconds", "staging of one replica", timings.stage_s, replica=name)
    return generate_latest(registry).decode()
