"""What was seen from outside: answers, events and states of the fleet, read from the recorder's file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DONE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request and what came of it; times are seconds since the epoch.

    Attributes:
        status: of the answer; 0 where there was none.
        error: why it has no whole answer; empty if it has.
    """

    request_id: int
    start: float
    end: float
    stream: bool
    status: int
    replica: str = ""
    version: int | None = None
    spans: Sequence[Span] = ()
    tokens: Sequence[int] = ()
    finish: str | None = None
    wanted: int = 0  # tokens
    error: str = ""

    @property
    def whole(self) -> bool:
        return self.status == DONE and not self.error

    @property
    def began(self) -> bool:
        """A part of the answer had arrived."""
        return bool(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One event of `/fleet/events`."""

    at: float
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """`/fleet` at one moment; `serving` by replica id, with the version that it holds."""

    at: float
    version: int
    phase: str | None  # of the round in flight
    serving: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A round of `/fleet/rounds`."""

    round_id: int
    version: int
    label: str | None
    phase: str
    replicas: frozenset[str]
    fenced: frozenset[str]
    digest: str | None = None


@dataclass(slots=True, kw_only=True)
class Recording:
    answers: list[Seen] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    rounds: list[Ended] = field(default_factory=list)
    decided: dict[int, float] = field(default_factory=dict)  # when a version was decided, as events say
    unanswered: dict[int, float] = field(default_factory=dict)  # when requests began that have not ended

    def since(self, at: float) -> "Recording":
        """What was seen from a moment on; an answer belongs to the time at which it ended."""
        return Recording(
            answers=[each for each in self.answers if each.end >= at],
            events=[each for each in self.events if each.at >= at],
            states=[each for each in self.states if each.at >= at],
            rounds=self.rounds,
            decided=self.decided,
            unanswered=self.unanswered,
        )


class Reader:
    """Reads the recorder's file as it grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._event_ids: set[int] = set()
        self.recording = Recording()

    def read(self) -> Recording:
        """All that was seen so far; the last line may be incomplete, and is left for later."""
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._add(json.loads(line))
        self.recording.answers.sort(key=lambda seen: seen.start)
        return self.recording

    def _add(self, line: dict[str, Any]) -> None:
        recording = self.recording
        match line.pop("kind"):
            case "began":
                recording.unanswered[line["request_id"]] = line["at"]
            case "answer":
                recording.unanswered.pop(line["request_id"], None)
                line["spans"] = [Span(**each) for each in line["spans"]]
                recording.answers.append(Seen(**line))
            case "event" if line["event_id"] not in self._event_ids:
                self._event_ids.add(line["event_id"])
                happened = Happened(at=line["at"], name=line["name"], fields=line["fields"])
                recording.events.append(happened)
                if happened.name == "round" and happened.fields["phase"] == "committing":
                    recording.decided.setdefault(int(happened.fields["version"]), happened.at)
            case "fleet":
                recording.states.append(State(**line))


def rounds_of(reports: Iterable[Mapping[str, Any]]) -> list[Ended]:
    """The entries of `/fleet/rounds`."""
    return [
        Ended(
            round_id=each["round_id"],
            version=each["version"],
            label=each["label"],
            phase=each["phase"],
            replicas=frozenset(each["replicas"]),
            fenced=frozenset(each["fenced"]),
            digest=each["digest"],
        )
        for each in reports
    ]
