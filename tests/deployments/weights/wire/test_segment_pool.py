import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deployments.weights.wire import shared_memory
from deployments.weights.wire.ownership import DIRECTORY, owner
from deployments.weights.wire.segment_pool import Segment, SegmentPool, open_locked

SIZE = 4096
RECEIVER = """
import sys
from deployments.weights.wire.segment_pool import open_locked
mapping = open_locked(sys.argv[1], int(sys.argv[2]))
print("mapped", flush=True)
sys.stdin.read()
"""


OTHERS: set[str] = set()  # of tests before


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    OTHERS.clear()
    OTHERS.update(names())
    pool = SegmentPool()
    yield pool
    pool.close()


def names() -> set[str]:
    return {path.name for path in DIRECTORY.glob(owner().name("*"))} - OTHERS


def sent(pool: SegmentPool, content: bytes) -> Segment:
    """As a sender does: its name has been told."""
    segment = pool.take(0, SIZE)
    segment.mapping[: len(content)] = content
    return segment


def test_memory_that_nobody_maps_is_filled_again_under_another_name(pool: SegmentPool) -> None:
    first = sent(pool, b"one")
    name = first.name
    mapping = open_locked(name, SIZE)
    first.rename(first.name)
    del mapping
    second = sent(pool, b"two")
    assert second is first and second.name != name and len(names()) == 1
    assert open_locked(second.name, SIZE)[:3] == b"two"


def test_what_a_receiver_still_maps_stays_as_it_is(pool: SegmentPool) -> None:
    first = sent(pool, b"one")
    mapping = open_locked(first.name, SIZE)
    first.rename(first.name)
    view = memoryview(mapping)  # as a tensor has it
    del mapping
    second = sent(pool, b"two")
    assert second is not first and bytes(view[:3]) == b"one" and names() == {second.name}
    del view
    second.rename(second.name)
    assert sent(pool, b"three") is second


def test_a_receiver_that_is_killed_maps_nothing(pool: SegmentPool) -> None:
    segment = sent(pool, b"one")
    command = [sys.executable, "-c", RECEIVER, segment.name, str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == b"mapped\n"
        assert not segment.is_free()
        receiver.kill()
        receiver.wait(30)
        assert segment.is_free()


def test_a_receiver_that_comes_late_finds_nothing(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = sent(pool, b"one")
    name = segment.name
    opened = os.open

    def slow(path: os.PathLike[str], flags: int) -> int:
        descriptor = opened(path, flags)
        segment.rename(name)  # all others have it, and the next round begins
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    with pytest.raises(ValueError, match=f"^segment '{name}' does not exist on this host any more$"):
        open_locked(name, SIZE)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"^segment '{name}' does not exist on this host$"):
        open_locked(name, SIZE)
    assert segment.is_free()


def test_a_call_that_was_abandoned_tells_no_name_of_the_next_round(pool: SegmentPool) -> None:
    first = sent(pool, b"one")
    told = first.name  # and nobody has opened it yet
    second = sent(pool, b"two")
    assert second is first and second.name != told
    with pytest.raises(ValueError, match=f"^segment '{told}' does not exist on this host$"):
        open_locked(told, SIZE)
    name = second.name
    first.rename(told)  # the call has ended now
    assert second.name == name and open_locked(name, SIZE)[:3] == b"two"


def test_a_chunk_of_another_size_gets_other_memory(pool: SegmentPool) -> None:
    first = pool.take(0, SIZE)
    assert len(pool.take(0, 2 * SIZE).mapping) == 2 * SIZE
    assert pool.take(1, SIZE) is not first and len(names()) == 2


def test_no_name_is_left(pool: SegmentPool) -> None:
    segment = pool.take(0, SIZE)
    pool.close()
    segment.rename(segment.name)  # on the thread of a call that was abandoned
    assert not names()
    unclosed = SegmentPool()
    unclosed.take(0, SIZE)
    assert len(names()) == 1
    del unclosed
    assert not names()


def test_a_fork_of_the_sender_removes_nothing(pool: SegmentPool) -> None:
    segment = pool.take(0, SIZE)
    child = os.fork()
    if child == 0:
        try:
            pool.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert names() == {segment.name} and segment.is_free()


def test_the_lock_ends_with_the_mapping_and_not_before() -> None:
    segment = Segment(SIZE)
    locked = open_locked(segment.name, SIZE)
    assert not segment.is_free()
    locked.close()
    assert segment.is_free()
    unlocked = shared_memory.open_mapping(segment.name, mmap.ACCESS_READ, SIZE)
    assert segment.is_free() and len(unlocked) == SIZE
    segment.close()
