import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import RULES, Expected, check
from tests.chaos.marked_weights import MIXED, token_of
from tests.chaos.recording import Ended, Happened, Reader, Recording, Seen, Span, State

NOBODY: frozenset[str] = frozenset()


def seen(request_id: int, start: float, end: float, *spans: tuple[int, int], **changes: Any) -> Seen:
    """A whole answer with spans of (version, tokens), of weights whose mark is the version."""
    made, tokens = [], []
    for version, count in spans:
        made.append(Span(version=version, start=len(tokens), end=len(tokens) + count))
        tokens += [token_of(version)] * count
    fields: dict[str, Any] = {
        "request_id": request_id,
        "start": start,
        "end": end,
        "stream": False,
        "status": 200,
        "replica": "a",
        "version": spans[-1][0] if spans else None,
        "spans": made,
        "tokens": tokens,
        "wanted": len(tokens),
        "finish": "length",
    }
    return Seen(**{**fields, **changes})


def honest() -> Recording:
    """Version 1 at 10 s, version 2 at 20 s; one answer spans the first commit; replica b is lost at 30 s."""
    return Recording(
        answers=[
            seen(1, 1.0, 2.0, (0, 4)),
            seen(2, 9.0, 11.0, (0, 3), (1, 5)),
            seen(3, 12.0, 13.0, (1, 6)),
            seen(4, 21.0, 22.0, (2, 6)),
            seen(5, 29.0, 30.1, (2, 3), replica="b", stream=True, error="the replica was lost", wanted=9),
            seen(6, 29.0, 32.0, (2, 6)),
        ],
        events=[
            *[
                Happened(at=10.0 * version - 2, name="round", fields={"round_id": version, "phase": "open"})
                for version in (1, 2)
            ],
            Happened(at=30.0, name="lost", fields={"replica": "b", "reason": "gone"}),
        ],
        decided={1: 10.0, 2: 20.0},
        states=[
            State(at=5.0, version=0, phase=None, serving={"a": 0, "b": 0}),
            State(at=10.1, version=1, phase="committing", serving={"a": 0, "b": 1}),
            State(at=11.5, version=1, phase=None, serving={"a": 1, "b": 1}),
            State(at=20.5, version=2, phase=None, serving={"a": 2, "b": 2}),
            State(at=29.5, version=2, phase=None, serving={"a": 2, "b": 2}),
            State(at=30.5, version=2, phase=None, serving={"a": 2}),
        ],
        rounds=[
            Ended(
                round_id=version,
                version=version,
                label=f"mark-{version}",
                phase="committed",
                replicas=frozenset({"a", "b"}),
                fenced=NOBODY,
            )
            for version in (1, 2)
        ],
    )


def broken(recording: Recording, **expected: Any) -> set[str]:
    """The rules that find something."""
    return {text.split(":")[0] for text in check(recording, Expected(**expected))}


def with_answer(answer: Seen) -> Recording:
    recording = honest()
    recording.answers.append(answer)
    return recording


def test_an_honest_recording_breaks_no_rule() -> None:
    assert check(honest(), Expected(whole_at=40.0)) == []


def of_a_controller_that_died_after_its_decision(version: int) -> Recording:
    """Nobody has read that version 2 was decided at 19.2 s: the successor says it at 25 s."""
    recording = with_answer(seen(9, 19.0, 19.5, (1, 2), (2, 2)))
    recording.decided[2] = 25.0
    heard = Happened(at=19.1, name="round", fields={"round_id": 2, "phase": "verifying"})
    start = Happened(at=24.9, name="start", fields={"generation": 2, "version": version})
    recording.events[2:2] = [heard, start]
    recording.answers = [each for each in recording.answers if each.start < 20.0]
    return recording


def test_what_a_controller_starts_with_was_decided_by_its_predecessor() -> None:
    assert broken(of_a_controller_that_died_after_its_decision(2)) == set()
    assert broken(of_a_controller_that_died_after_its_decision(1)) == {"only_committed_versions"}
    early = of_a_controller_that_died_after_its_decision(2)
    early.answers.append(seen(10, 18.0, 18.5, (1, 2), (2, 2)))
    assert "only_committed_versions" in broken(early)


def test_each_rule_has_a_forgery() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for _, rule in FORGED}


FORGED = [
    (seen(9, 25.0, 26.0, (3, 4)), "only_committed_versions"),
    (seen(9, 8.0, 9.5, (0, 2), (1, 4)), "only_committed_versions"),
    (replace(seen(9, 21.0, 22.0, (2, 4)), tokens=[token_of(1)] * 4), "tokens_are_those_of_their_version"),
    (
        replace(seen(9, 21.0, 22.0, (2, 4)), tokens=[token_of(2)] * 3 + [MIXED]),
        "tokens_are_those_of_their_version",
    ),
    (seen(9, 21.0, 22.0, (2, 4), wanted=5), "whole_answers_are_whole"),
    (seen(9, 21.0, 22.0, (2, 4), version=1), "whole_answers_are_whole"),
    (seen(9, 21.0, 22.0, (2, 4), spans=[]), "whole_answers_are_whole"),
    (seen(9, 11.2, 11.4, (0, 4)), "never_older"),
    (seen(9, 12.0, 12.4, (0, 4)), "never_behind"),
    (seen(9, 21.0, 22.0, status=503, error="no replica"), "no_request_is_lost"),
    (seen(9, 21.0, 22.0, status=0, error="the connection broke"), "no_request_is_lost"),
    (seen(9, 29.0, 31.0, status=422, error="deadly"), "no_request_is_lost"),
    (seen(9, 21.0, 22.0, (2, 3), error="it broke off", replica="a", wanted=9), "broken_streams_have_a_cause"),
    (None, "all_members_or_none"),
    (None, "a_version_has_one_digest"),
    (None, "what_was_published_stays"),
    (None, "a_round_includes_every_member"),
    (None, "no_other_replica_is_lost"),
    (None, "nothing_hangs"),
]


@pytest.mark.parametrize(("answer", "rule"), [(a, r) for a, r in FORGED if a is not None])
def test_a_forged_answer_is_found(answer: Seen, rule: str) -> None:
    assert rule in broken(with_answer(answer))


def test_a_member_that_a_round_left_out_is_found() -> None:
    recording = honest()
    recording.states.append(State(at=23.0, version=2, phase=None, serving={"a": 2, "b": 1}))
    assert broken(recording) == {"all_members_or_none"}


def test_more_losses_than_the_case_takes_away_are_found() -> None:
    assert broken(honest(), may_lose=0) == {"no_other_replica_is_lost"}
    assert broken(honest(), may_lose=1) == set()


def test_a_round_without_a_member_that_served_is_found() -> None:
    recording = honest()
    recording.rounds[0] = replace(recording.rounds[0], replicas=frozenset({"a"}))
    assert broken(recording) == set(), "b was lost later"
    recording.rounds[0] = replace(recording.rounds[0], replicas=frozenset({"b"}))
    assert broken(recording) == {"a_round_includes_every_member"}
    recording.rounds[0] = replace(recording.rounds[0], fenced=frozenset({"a"}))
    assert broken(recording) == set()


@pytest.mark.parametrize("changes", [{"digest": "bb"}, {"round_id": 3}])
def test_a_version_with_two_digests_or_rounds_is_found(changes: dict[str, Any]) -> None:
    recording = honest()
    recording.rounds.append(replace(recording.rounds[1], **changes))
    assert broken(recording) == {"a_version_has_one_digest"}


def test_a_version_that_is_undone_is_found() -> None:
    recording = honest()
    recording.states.append(State(at=33.0, version=1, phase="open", serving={"a": 1}))
    assert broken(recording) == {"what_was_published_stays"}


def test_a_request_without_an_end_is_found() -> None:
    recording = honest()
    recording.unanswered[7] = 31.0
    assert broken(recording, whole_at=40.0) == {"nothing_hangs"}


def test_two_sets_of_weights_under_one_number_are_found_without_a_label() -> None:
    recording = honest()
    recording.rounds = [replace(each, label="trainer") for each in recording.rounds]
    assert broken(recording) == set()
    recording.answers.append(replace(seen(9, 21.0, 22.0, (2, 4)), tokens=[token_of(5)] * 4))
    assert broken(recording) == {"tokens_are_those_of_their_version"}


def test_what_a_case_allows_is_no_fault() -> None:
    refused = seen(9, 21.0, 22.0, status=503, error="no replica")
    assert broken(with_answer(refused), router_lost=True) == set()
    older = seen(9, 11.2, 11.4, (0, 4))
    assert "never_older" not in broken(with_answer(older), together=False)
    broke = seen(9, 21.0, 22.0, (2, 3), error="it broke off", wanted=9)
    assert broken(with_answer(broke), killed=frozenset({"a"})) == set()


def test_a_deadly_request_may_be_refused() -> None:
    recording = with_answer(seen(9, 29.0, 31.0, status=422, error="deadly"))
    recording.events.append(Happened(at=30.5, name="lost", fields={"replica": "c", "reason": "gone"}))
    assert broken(recording) == set()


def test_refusals_are_allowed_while_no_replica_serves() -> None:
    recording = with_answer(seen(9, 29.0, 35.0, status=503, error="no replica"))
    recording.states.append(State(at=31.0, version=2, phase=None, serving={}))
    assert broken(recording) == set()


def test_the_file_is_read_as_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    event = {
        "kind": "event",
        "event_id": 1,
        "at": 10.0,
        "name": "round",
        "fields": {"phase": "committing", "version": 1},
    }
    lines = [
        {"kind": "began", "request_id": 1, "at": 1.0},
        {"kind": "began", "request_id": 2, "at": 1.5},
        event,
        event,  # the recorder connected again
    ]
    answer = {
        "kind": "answer",
        "request_id": 1,
        "start": 1.0,
        "end": 2.0,
        "stream": True,
        "status": 200,
        "version": 0,
        "wanted": 2,
        "tokens": [3, 3],
        "spans": [{"version": 0, "start": 0, "end": 2}],
        "finish": "length",
        "error": "",
    }
    reader = Reader(file)
    whole = json.dumps(answer)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + whole[:30])
    assert reader.read().answers == [] and reader.recording.unanswered == {1: 1.0, 2: 1.5}
    with file.open("a") as stream:
        stream.write(whole[30:] + "\n")
    recording = reader.read()
    assert recording.unanswered == {2: 1.5} and len(recording.events) == 1 and recording.decided == {1: 10.0}
    assert [each.spans for each in recording.answers] == [[Span(version=0, start=0, end=2)]]
    assert recording.since(3.0).answers == []
