"""What must hold, whatever happened to the fleet: each rule reads a recording and returns what broke it.

Time is that of the recorder's machine, which is the fleet's as well. `SLACK_S` is what two of its clocks may
differ.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.marked_weights import MIXED, token_of
from tests.chaos.recording import Ended, Happened, Recording, Seen

SLACK_S = 0.05
MARK = "mark-"  # the label of a version, before its mark
REFUSED = 422  # a request under which two replicas were lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the case allows.

    Attributes:
        together: the fleet commits as one.
        router_lost: the case takes the router, or what is before it, away: its requests end with it.
        killed: replica ids whose processes the case touched.
    """

    together: bool = True
    router_lost: bool = False
    killed: frozenset[str] = frozenset()
    may_lose: int = 2  # replicas
    whole_at: float = 0.0  # when the fleet was at full strength again
    marks: Mapping[int, int] = field(default_factory=dict)  # by version, where known otherwise than by label


Rule = Callable[[Recording, Expected], Iterator[str]]


def check(recording: Recording, expected: Expected) -> list[str]:
    """Every broken promise, in words; empty if all hold."""
    return [f"{rule.__name__}: {text}" for rule in RULES for text in rule(recording, expected)]


def only_committed_versions(recording: Recording, expected: Expected) -> Iterator[str]:
    """No answer has a token of a version that was not committed when the answer ended."""
    decided = _decided_at(recording)
    for seen in recording.answers:
        for span in seen.spans:
            if span.version not in decided:
                yield f"request {seen.request_id} has tokens of version {span.version}, never committed"
            elif decided[span.version] > seen.end + SLACK_S:
                yield f"request {seen.request_id} has tokens of version {span.version} before its commit"


def tokens_are_those_of_their_version(recording: Recording, expected: Expected) -> Iterator[str]:
    """Every token is the one that the weights of its version answer, and a version has one set of weights."""
    tokens = {version: token_of(mark) for version, mark in {**_marks(recording), **expected.marks}.items()}
    for seen in recording.answers:
        for span in seen.spans:
            got = set(seen.tokens[span.start : span.end])
            wanted = tokens.setdefault(span.version, min(got, default=MIXED))
            if MIXED in got:
                yield f"request {seen.request_id}: mixed weights under version {span.version}"
            elif got - {wanted}:
                yield (
                    f"request {seen.request_id}: version {span.version} answers token {wanted}, "
                    f"got {sorted(got)}"
                )


def whole_answers_are_whole(recording: Recording, expected: Expected) -> Iterator[str]:
    """As many tokens as were asked for, each in a span, spans in order, the version that of the last one."""
    for seen in recording.answers:
        if not seen.whole:
            continue
        spans = seen.spans
        covered = bool(spans) and spans[0].start == 0 and spans[-1].end == len(seen.tokens)
        joined = all(a.end == b.start and a.version < b.version for a, b in pairwise(spans))
        if len(seen.tokens) != seen.wanted and seen.finish != "abort":
            yield f"request {seen.request_id}: {len(seen.tokens)} of {seen.wanted} tokens, {seen.finish!r}"
        if not covered or not joined or seen.version != spans[-1].version:
            yield f"request {seen.request_id}: version {seen.version} over spans {list(spans)}"


def never_older(recording: Recording, expected: Expected) -> Iterator[str]:
    """Under `together` an answer that starts after another has ended is never older."""
    if not expected.together:
        return
    ended = sorted(
        (seen.end, seen.version) for seen in recording.answers if seen.whole and seen.version is not None
    )
    ends = [end for end, _ in ended]
    newest: list[int] = []
    for _, version in ended:
        newest.append(max(version, newest[-1] if newest else 0))
    for seen in recording.answers:
        before = bisect_left(ends, seen.start)
        if seen.spans and before and seen.spans[0].version < newest[before - 1]:
            yield (
                f"request {seen.request_id} began with version {seen.spans[0].version} after an answer of "
                f"version {newest[before - 1]} had ended"
            )


def never_behind(recording: Recording, expected: Expected) -> Iterator[str]:
    """After a round has ended, no answer begins with a version before its own."""
    finished = [(state.at + SLACK_S, state.version) for state in recording.states if state.phase is None]
    times = [at for at, _ in finished]
    for seen in recording.answers:
        before = bisect_left(times, seen.start)
        if seen.spans and before and seen.spans[0].version < finished[before - 1][1]:
            yield (
                f"request {seen.request_id} began with version {seen.spans[0].version} after the round of "
                f"version {finished[before - 1][1]} had ended"
            )


def all_members_or_none(recording: Recording, expected: Expected) -> Iterator[str]:
    """Between rounds all that serve hold the committed version."""
    for state in recording.states:
        others = {name: held for name, held in state.serving.items() if held != state.version}
        if state.phase is None and others:
            yield f"version {state.version} is committed and no round is open, but {others} serve"


def a_version_has_one_digest(recording: Recording, expected: Expected) -> Iterator[str]:
    """One round commits a version, and reports one digest of it, whenever it is asked."""
    first: dict[int, Ended] = {}
    for ended in recording.rounds:
        if ended.phase != "committed":
            continue
        before = first.setdefault(ended.version, ended)
        if (ended.round_id, ended.digest) != (before.round_id, before.digest):
            yield (
                f"version {ended.version} is round {before.round_id} with digest {before.digest}, and round "
                f"{ended.round_id} with digest {ended.digest}"
            )


def what_was_published_stays(recording: Recording, expected: Expected) -> Iterator[str]:
    """The committed version never goes down: a rollback is a later version."""
    for before, after in pairwise(recording.states):
        if after.version < before.version:
            yield f"version {before.version} was committed, and {after.version} at {after.at:.1f}"


def a_round_includes_every_member(recording: Recording, expected: Expected) -> Iterator[str]:
    """Who served when a committed round was opened is in its report, or was fenced or lost."""
    gone = {str(event.fields.get("replica")) for event in recording.events if event.name in ("lost", "fence")}
    opened = {
        event.fields["round_id"]: event.at
        for event in recording.events
        if event.name == "round" and event.fields["phase"] == "open"
    }
    for ended in recording.rounds:
        if ended.phase != "committed" or ended.round_id not in opened:
            continue
        before = [state for state in recording.states if state.at < opened[ended.round_id]]
        left_out = set(before[-1].serving if before else ()) - ended.replicas - ended.fenced - gone
        if left_out:
            yield f"round {ended.round_id} was committed without {sorted(left_out)}"


def no_request_is_lost(recording: Recording, expected: Expected) -> Iterator[str]:
    """A request that had not begun to be answered is answered, if any replica served all the while."""
    if expected.router_lost:
        return
    gone = [event for event in recording.events if event.name in ("lost", "fence")]
    for seen in recording.answers:
        if seen.whole or seen.began:
            continue
        if seen.status == REFUSED and len(_during(gone, seen)) >= 2:
            continue
        during = [each for each in recording.states if seen.start <= each.at <= seen.end]
        if not during or all(each.serving for each in during):
            took_s = seen.end - seen.start
            yield f"request {seen.request_id} was lost after {took_s:.2f} s: {seen.status} {seen.error}"


def broken_streams_have_a_cause(recording: Recording, expected: Expected) -> Iterator[str]:
    """An answer ends in the middle only if its replica was lost, fenced or touched by the case."""
    if expected.router_lost:
        return
    gone = {str(event.fields.get("replica")) for event in recording.events if event.name in ("lost", "fence")}
    for seen in recording.answers:
        if seen.began and not seen.whole and seen.replica not in gone | expected.killed:
            yield f"request {seen.request_id} broke off on {seen.replica!r}, which was not lost: {seen.error}"


def no_other_replica_is_lost(recording: Recording, expected: Expected) -> Iterator[str]:
    """No more replicas are lost or fenced than the case takes away."""
    gone = {event.fields["replica"]: event for event in recording.events if event.name in ("lost", "fence")}
    if len(gone) > expected.may_lose:
        reasons = {name: event.fields["reason"] for name, event in gone.items()}
        yield f"at most {expected.may_lose} replicas may be lost, and {len(gone)} were: {reasons}"


def nothing_hangs(recording: Recording, expected: Expected) -> Iterator[str]:
    """Every request that began before the fleet was whole again has ended."""
    for request_id, began in recording.unanswered.items():
        if began < expected.whole_at:
            waits_s = expected.whole_at - began
            yield f"request {request_id} began {waits_s:.1f} s before the end and has no answer"


RULES: Sequence[Rule] = (
    only_committed_versions,
    tokens_are_those_of_their_version,
    whole_answers_are_whole,
    never_older,
    never_behind,
    all_members_or_none,
    a_version_has_one_digest,
    what_was_published_stays,
    a_round_includes_every_member,
    no_request_is_lost,
    broken_streams_have_a_cause,
    no_other_replica_is_lost,
    nothing_hangs,
)


def _decided_at(recording: Recording) -> dict[int, float]:
    """When each version was decided, at the earliest; 0 where only its report was seen.

    A controller may die after it has decided and before anybody has read its event; then its successor's is
    seen. What that one starts with was durable before, and decided after the dead one's last event.
    """
    reported = {each.version: 0.0 for each in recording.rounds if each.phase == "committed"}
    decided = {0: 0.0, **reported, **recording.decided}
    for start in (event for event in recording.events if event.name == "start"):
        version = int(start.fields["version"])
        if decided.get(version, 0.0) >= start.at:
            decided[version] = max((each.at for each in recording.events if each.at < start.at), default=0.0)
    return decided


def _marks(recording: Recording) -> dict[int, int]:
    committed = [each for each in recording.rounds if each.phase == "committed" and each.label]
    return {0: 0} | {
        each.version: int(each.label.removeprefix(MARK))
        for each in committed
        if each.label is not None and each.label.startswith(MARK)
    }


def _during(events: Sequence[Happened], seen: Seen) -> list[Happened]:
    return [event for event in events if seen.start - SLACK_S <= event.at <= seen.end + SLACK_S]
