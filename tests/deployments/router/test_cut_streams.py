"""What a router keeps of a stream, and what it passes on."""

from deployments.router import cut_streams
from deployments.router.cut_streams import CutStream

FIRST = b": said [1]\n\ndata: a\n\n: said [2]\n\ndata: b\n\n"


def test_comments_are_kept_and_events_are_passed_whole() -> None:
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
    stream.events(FIRST + b": said [3]\n\ndata: c, cut o")
    stream.continues()
    again = b"data: A\n\ndata: B\n\ndata: C\n\n: said [4]\n\ndata: D\n\n"
    assert stream.events(again[:12]) + stream.events(again[12:]) == b"data: C\n\ndata: D\n\n"
    assert stream.said == b"[1]\n[2]\n[3]\n[4]\n"
    stream.continues()
    assert stream.events(again) == b"", "four events have passed"


def test_a_stream_that_is_lost_while_events_come_again_loses_none() -> None:
    stream = CutStream()
    stream.events(FIRST)
    stream.continues()
    stream.events(b"data: A\n\n")
    stream.continues()
    assert stream.events(b"data: A\n\ndata: B\n\ndata: C\n\n") == b"data: C\n\n"


def test_a_stream_that_ends_before_what_the_client_has_is_short() -> None:
    stream = CutStream()
    stream.events(FIRST)
    stream.continues()
    assert stream.events(b"data: A\n\n") == b"" and stream.is_short
    assert stream.events(b"data: B\n\n") == b"" and not stream.is_short


def test_what_cannot_be_continued_stays_so() -> None:
    stream = CutStream()
    stream.events(FIRST + b": said null\n\n: said [3]\n\n")
    assert stream.said is None


def test_a_stream_that_has_said_too_much_is_not_continued() -> None:
    stream = CutStream()
    stream.events(b": said " + b"1" * cut_streams.MAX_KEPT_BYTES + b"\n\ndata: a\n\n")
    assert stream.said is None


def test_an_orderly_stop_is_of_one_replica() -> None:
    stream = CutStream()
    stream.events(FIRST + b': said "moved"\n\n')
    assert stream.moved and stream.said == b"[1]\n[2]\n"
    stream.continues()
    assert not stream.moved
