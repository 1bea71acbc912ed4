"""What operators see of the ledger's events: a line in the log for each that changes what the fleet does, and
Prometheus' counts of rounds and fences.

`/fleet/events` carries the same events for programs. `docs/operating/runbook.md` explains each line; a test
checks it.
"""

import logging
import re
from collections.abc import Iterable, Sequence

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import Event
from deployments.serve.instruments import FENCES, ROUND, ROUND_GAP, ROUND_PART, Record, record

logger = serve_logger()

INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR

_LINES = {
    "start": (INFO, "controller started; version {version} is committed"),
    "join": (INFO, "replica {replica} starts and loads version {version}"),
    "admit": (INFO, "replica {replica} serves version {version}"),
    "fence": (
        WARNING,
        "replica {replica} is fenced{round}: {reason}. It gets no requests; Serve replaces it",
    ),
    "lost": (
        WARNING,
        "replica {replica} is lost{round}: {reason}. Its requests are retried on others; Serve replaces it",
    ),
    "lost fenced": (INFO, "the process of fenced replica {replica} is gone"),
    "proof": (
        WARNING,
        "replica {replica} computes something else with version {version}: its scores of the proof are up to "
        "{said}",
    ),
    "scale": (INFO, "operator set {count}; Serve scales the deployment"),
    "leaving": (INFO, "replica {replica} is being stopped: it finishes its requests"),
    "left": (INFO, "replica {replica} has left"),
    "round aborted": (WARNING, "round {round_id} is aborted, the fleet keeps its version: {reason}"),
    "round committed": (INFO, "version {version} is committed on {count} (round {round_id}, {age_s} s)"),
    "adapter live": (INFO, "adapter {lora_name}@{version} is live on all serving replicas"),
    "adapter retired": (INFO, "adapter {lora_name}@{version} is retired; running requests finish on it"),
    "adapter failed": (WARNING, "adapter {lora_name}@{version} was not loaded on any replica: {reason}"),
    "lease_expired": (
        WARNING,
        "the lease of publisher {publisher!r} expired{round}. Its undecided round is aborted",
    ),
    "drain_expired": (
        WARNING,
        "{what}: requests still run after {timeout_s} s ({counts}). What follows: {then}",
    ),
    "not_stored": (
        ERROR,
        "version {version} is not in the store: {reason}. Replicas that start wait for the next round",
    ),
    "unloadable": (
        WARNING,
        "replica {replica} cannot load version {version} from the store: {reason}. It gets another version, "
        "or waits for the next round",
    ),
    "refused": (
        ERROR,
        "replica {replica} is refused: {reason}. It starts once it finds version 0 or a newer one",
    ),
}


class LogLines:
    """Writes events to Serve's log. Remembers the round in flight, which other events belong to."""

    def __init__(self) -> None:
        self.last_id = 0
        self._round = ""
        self._fenced: set[JsonValue] = set()

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            self.last_id = event.event_id
            fields = {"round": self._round, **event.fields}
            key = self._key(event)
            if "replicas" in fields and event.name == "round":
                fields["count"] = _replicas(fields["replicas"])
            elif event.name == "scale":
                wanted = fields["wanted"]
                fields["count"] = "the number by load" if wanted is None else f"{wanted} replicas"
            elif event.name == "drain_expired":
                fields["counts"] = _counts(fields["running"])
            if key in _LINES:
                level, text = _LINES[key]
                logger.log(level, "%s", text.format_map(fields))

    def _key(self, event: Event) -> str:
        match event.name:
            case "round":
                phase = event.fields["phase"]
                over = phase in ("aborted", "committed")
                self._round = "" if over else f" in round {event.fields['round_id']} ({phase})"
                return f"round {phase}"
            case "adapter":
                return f"adapter {event.fields['phase']}"
            case "fence":
                self._fenced.add(event.fields["replica"])
            case "lost" if event.fields["replica"] in self._fenced:
                self._fenced.discard(event.fields["replica"])
                return "lost fenced"
        return event.name


def _counts(running: object) -> str:
    pairs = sorted(running.items()) if isinstance(running, dict) else []
    return ", ".join(f"replica {name}: {'unknown' if count < 0 else count}" for name, count in pairs)


def _replicas(ids: object) -> str:
    count = len(ids) if isinstance(ids, list) else 0
    return "1 replica" if count == 1 else f"{count} replicas"


_ACTION = re.compile(r"([a-z_]+): ")


def count(events: Iterable[Event], rounds: Sequence[RoundReport], record: Record = record) -> None:
    """`rounds`: those that ended."""
    for event in events:
        if event.name == "fence":
            record(FENCES, reason=kind_of(str(event.fields["reason"])))
        elif event.name == "round" and event.fields["phase"] in ("committed", "aborted"):
            for report in (each for each in rounds if each.round_id == event.fields["round_id"]):
                record(ROUND, report.duration_s, outcome=report.phase)
                if report.phase == "committed":
                    for part, spent_s in report.parts.items():
                        record(ROUND_PART, spent_s, part=part)
                    for timings in report.replicas.values():
                        record(ROUND_GAP, timings.gap_s)


def kind_of(reason: str) -> str:
    if found := _ACTION.match(reason):
        return found[1]
    return "deadline" if reason.startswith("missed the deadline") else "other"
