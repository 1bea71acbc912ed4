"""What a router keeps of a stream, and what it passes on."""

from collections.abc import Sequence

import pytest

from deployments.protocol.rollouts import MOVED, NOT_CONTINUED, framed
from deployments.router.cut_streams import CutStream

FIRST = [framed(b"[1]\n", b"data: a\n\n"), framed(b"[2]\n", b"data: b\n\n")]


def again(events: str) -> list[bytes]:
    return [framed(b"", f"data: {each}\n\n".encode()) for each in events]


def passed(stream: CutStream, frames: Sequence[bytes]) -> bytes:
    return b"".join(stream.events(frame) for frame in frames)


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_what_was_said_is_kept_and_events_are_passed_whole(size: int) -> None:
    """Whatever pieces they come in: a frame is a chunk, of which a read may have a part."""
    stream = CutStream()
    for frame, event in zip(FIRST, (b"data: a\n\n", b"data: b\n\n"), strict=True):
        pieces = [frame[start : start + size] for start in range(0, len(frame), size)]
        assert [stream.events(piece) for piece in pieces] == [*[b""] * (len(pieces) - 1), event]
    assert stream.said == b"[1]\n[2]\n"


def test_another_replicas_events_follow_those_that_the_client_has() -> None:
    stream = CutStream()
    passed(stream, [*FIRST, framed(b"[3]\n", b"data: c\n\n")[:-1]])
    assert stream.said == b"[1]\n[2]\n", "of what the client has, and no more"
    stream.continues()
    third = framed(b"[3]\n", b"data: C\n\n")
    second = [*again("AB"), third[:12], third[12:], framed(b"[4]\n", b"data: D\n\n")]
    assert passed(stream, second) == b"data: C\n\ndata: D\n\n"
    assert stream.said == b"[1]\n[2]\n[3]\n[4]\n"
    stream.continues()
    assert passed(stream, again("ABCD")) == b"", "four events have passed"


def test_a_stream_that_is_lost_while_events_come_again_loses_none() -> None:
    stream = CutStream()
    passed(stream, FIRST)
    stream.continues()
    passed(stream, again("A"))
    stream.continues()
    assert passed(stream, again("ABC")) == b"data: C\n\n"


def test_a_stream_that_ends_before_what_the_client_has_is_short() -> None:
    stream = CutStream()
    passed(stream, FIRST)
    stream.continues()
    assert passed(stream, again("A")) == b"" and stream.is_short
    assert passed(stream, again("B")) == b"" and not stream.is_short


def test_an_error_of_the_replica_that_continues_reaches_the_client() -> None:
    stream = CutStream()
    passed(stream, FIRST)
    stream.continues()
    error = b'data: {"error": {}}\n\n'
    assert passed(stream, [*again("A"), framed(b"", error)]) == error and not stream.is_short


@pytest.mark.parametrize("continues", [False, True])
def test_what_cannot_be_continued_stays_so(continues: bool) -> None:
    stream = CutStream()
    passed(stream, FIRST)
    if continues:  # the second replica says so while events come again
        stream.continues()
    passed(stream, [framed(NOT_CONTINUED, b"data: c\n\n"), *again("d")])
    assert stream.said is None
    passed(stream, [framed(MOVED, b"")])
    assert stream.said is None and stream.moved, "another replica would give another answer"


def test_an_orderly_stop_is_of_one_replica() -> None:
    stream = CutStream()
    for frames in (FIRST, again("A")):  # the second is stopped while events come again
        passed(stream, [*frames, framed(MOVED, b"")])
        assert stream.moved and stream.said == b"[1]\n[2]\n"
        stream.continues()
        assert not stream.moved and stream.said == b"[1]\n[2]\n"
    assert passed(stream, again("ABC")) == b"data: C\n\n", "the stops were no events"
