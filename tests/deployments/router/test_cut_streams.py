"""What a router keeps of a stream, and what it passes on."""

import pytest

from deployments.protocol.rollouts import MOVED, NOT_CONTINUED, framed
from deployments.router import cut_streams
from deployments.router.cut_streams import CutStream

FIRST = framed(b"[1]\n", b"data: a\n\n") + framed(b"[2]\n", b"data: b\n\n")


def again(events: str) -> bytes:
    return b"".join(framed(b"", f"data: {each}\n\n".encode()) for each in events)


def test_what_was_said_is_kept_and_events_are_passed_whole() -> None:
    """Whatever pieces they come in."""
    for cuts in ([len(FIRST)], range(1, len(FIRST) + 1)):
        stream, passed, start = CutStream(), b"", 0
        for cut in cuts:
            piece = stream.events(FIRST[start:cut])
            assert piece in (b"", b"data: a\n\n", b"data: b\n\n", b"data: a\n\ndata: b\n\n")
            passed, start = passed + piece, cut
        assert (passed, stream.said) == (b"data: a\n\ndata: b\n\n", b"[1]\n[2]\n")


def test_another_replicas_events_follow_those_that_the_client_has() -> None:
    stream = CutStream()
    stream.events(FIRST + framed(b"[3]\n", b"data: c\n\n")[:-1])
    assert stream.said == b"[1]\n[2]\n", "of what the client has, and no more"
    stream.continues()
    second = again("AB") + framed(b"[3]\n", b"data: C\n\n") + framed(b"[4]\n", b"data: D\n\n")
    assert stream.events(second[:12]) + stream.events(second[12:]) == b"data: C\n\ndata: D\n\n"
    assert stream.said == b"[1]\n[2]\n[3]\n[4]\n"
    stream.continues()
    assert stream.events(again("ABCD")) == b"", "four events have passed"


def test_a_stream_that_is_lost_while_events_come_again_loses_none() -> None:
    stream = CutStream()
    stream.events(FIRST)
    stream.continues()
    stream.events(again("A"))
    stream.continues()
    assert stream.events(again("ABC")) == b"data: C\n\n"


def test_a_stream_that_ends_before_what_the_client_has_is_short() -> None:
    stream = CutStream()
    stream.events(FIRST)
    stream.continues()
    assert stream.events(again("A")) == b"" and stream.is_short
    assert stream.events(again("B")) == b"" and not stream.is_short


def test_an_error_of_the_replica_that_continues_reaches_the_client() -> None:
    stream = CutStream()
    stream.events(FIRST)
    stream.continues()
    error = b'data: {"error": {}}\n\n'
    assert stream.events(again("A") + framed(b"", error)) == error and not stream.is_short


def test_what_cannot_be_continued_stays_so() -> None:
    stream = CutStream()
    stream.events(FIRST + framed(NOT_CONTINUED, b"data: c\n\n") + again("d"))
    assert stream.said is None
    stream.events(framed(MOVED, b""))
    assert stream.said is None and stream.moved, "another replica would give another answer"


def test_a_stream_that_has_said_too_much_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_streams, "MAX_KEPT_BYTES", 1000)
    stream = CutStream()
    for _ in range(2):
        stream.events(framed(b"1" * cut_streams.MAX_KEPT_BYTES + b"\n", b"data: a\n\n"))
    assert stream.said is None and len(stream._kept) < 2 * cut_streams.MAX_KEPT_BYTES


def test_an_orderly_stop_is_of_one_replica() -> None:
    stream = CutStream()
    stream.events(FIRST + framed(MOVED, b""))
    assert stream.moved and stream.said == b"[1]\n[2]\n"
    stream.continues()
    assert not stream.moved and stream.said == b"[1]\n[2]\n"
