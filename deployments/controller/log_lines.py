"""What the operator reads: one line for each event of the ledger that changes what the fleet does.

The lines say what happened to which replica in which round, and what the system does about it.
`/fleet/events` says the same to a program. `docs/runbook.md` explains each line, which a test checks.
"""

import logging
from collections.abc import Iterable

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol.responses import Event

logger = serve_logger()

INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR


class LogLines:
    """Writes events to Serve's log. It remembers the round in flight, which other events belong to."""

    def __init__(self) -> None:
        self._last_id = 0
        self._round = ""
        self._fenced: set[JsonValue] = set()

    @property
    def last_id(self) -> int:
        """The newest event that is written."""
        return self._last_id

    def write(self, events: Iterable[Event]) -> None:
        """Events after `last_id`, oldest first."""
        for event in events:
            self._last_id = event.event_id
            level, text = self._line(event)
            if text:
                logger.log(level, "%s", text)

    def _line(self, event: Event) -> tuple[int, str]:
        """The level and the text; an empty text where the event needs no line."""
        fields = event.fields
        match event.name:
            case "start":
                return INFO, f"the controller has started; version {fields['version']} is committed"
            case "join":
                return INFO, f"replica {fields['replica']} starts and loads version {fields['version']}"
            case "admit":
                return INFO, f"replica {fields['replica']} serves version {fields['version']}"
            case "fence":
                self._fenced.add(fields["replica"])
                return WARNING, (
                    f"replica {fields['replica']} is fenced{self._round}: {fields['reason']}. "
                    "It gets no requests; Serve replaces it"
                )
            case "lost" if fields["replica"] in self._fenced:
                self._fenced.discard(fields["replica"])
                return INFO, f"the process of fenced replica {fields['replica']} is gone"
            case "lost":
                return WARNING, (
                    f"replica {fields['replica']} is lost{self._round}: {fields['reason']}. "
                    "Its requests are tried on others; Serve replaces it"
                )
            case "scale":
                wanted = fields["wanted"]
                count = "as many replicas as the load needs" if wanted is None else f"{wanted} replicas"
                return INFO, f"the operator wants {count}; Serve starts or stops towards it"
            case "leaving":
                return INFO, f"replica {fields['replica']} is not needed any more: it finishes its requests"
            case "left":
                return INFO, f"replica {fields['replica']} has left in order"
            case "round":
                return self._round_line(event)
            case "adapter":
                return _adapter_line(event)
            case "lease_expired":
                return WARNING, (
                    f"the lease of publisher {fields['publisher']!r} expired{self._round}. "
                    "An undecided round of it is aborted"
                )
            case "drain_expired":
                return WARNING, (
                    f"{fields['what']}: requests still run after {fields['timeout_s']} s "
                    f"({_counts(fields['running'])}). What follows: {fields['then']}"
                )
            case "not_stored":
                return ERROR, (
                    f"version {fields['version']} is not in the store: {fields['reason']}. "
                    "Replicas that start wait for the next round"
                )
            case "unloadable":
                return WARNING, (
                    f"replica {fields['replica']} cannot load version {fields['version']} from the store: "
                    f"{fields['reason']}. It gets another version, or waits for the next round"
                )
            case "given_up":
                return ERROR, (
                    f"version {fields['version']} does not load although its files are intact: replicas "
                    f"{fields['replicas']} were lost in it, one after the other. Those that start load what "
                    "the fleet started from and wait for a round; it is tried again in "
                    f"{fields['again_s']:g} s"
                )
            case "promise_lapsed":
                return WARNING, (
                    f"replica {fields['replica']} was told to load version {fields['version']} and has not "
                    f"after {fields['limit_s']:g} s: the version may be removed"
                )
            case _:
                return INFO, ""

    def _round_line(self, event: Event) -> tuple[int, str]:
        fields = event.fields
        name = f"round {fields['round_id']}"
        match fields["phase"]:
            case "aborted":
                self._round = ""
                return WARNING, f"{name} is aborted, the fleet keeps its version: {fields['reason']}"
            case "committed":
                self._round = ""
                return INFO, (
                    f"version {fields['version']} is committed on {_replicas(fields['replicas'])} "
                    f"({name}, {fields['age_s']} s)"
                )
            case phase:
                self._round = f" in {name} ({phase})"
                return INFO, ""


def _adapter_line(event: Event) -> tuple[int, str]:
    fields = event.fields
    name = f"adapter {fields['lora_name']}@{fields['version']}"
    match fields["phase"]:
        case "live":
            return INFO, f"{name} is live on all replicas that serve"
        case "retired":
            return INFO, f"{name} is live no more; running answers finish on it"
        case "failed":
            return WARNING, f"{name} is not loaded, and no replica keeps it: {fields['reason']}"
        case _:
            return INFO, ""


def _counts(running: object) -> str:
    """Requests by replica; a negative number: it did not say how many."""
    pairs = sorted(running.items()) if isinstance(running, dict) else []
    return ", ".join(f"replica {name}: {'unknown' if count < 0 else count}" for name, count in pairs)


def _replicas(ids: object) -> str:
    count = len(ids) if isinstance(ids, list) else 0
    return "1 replica" if count == 1 else f"{count} replicas"
