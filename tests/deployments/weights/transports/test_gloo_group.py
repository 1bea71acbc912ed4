"""Gloo's group: a way out of every wait, long before its timeout."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from deployments.weights.transports.gloo import GlooGroup
from deployments.weights.transports.rendezvous import MeetingInfo
from deployments.weights.wire.received_chunk import BrokenGroup

TIMEOUT_S = 8.0
AT_ONCE_S = 2.0


def info() -> MeetingInfo:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return MeetingInfo(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=3,
        names=[],
        dtype_names=[],
        shapes=[],
        chunk_bytes=1 << 20,
        timeout_s=TIMEOUT_S,
    )


@pytest.fixture
def calls() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield pool


@pytest.fixture
def groups(calls: ThreadPoolExecutor) -> list[GlooGroup]:
    meeting = info()
    return list(calls.map(lambda rank: GlooGroup(meeting, rank, go_on), range(3)))


def go_on() -> None:
    """Whoever waits has still something to wait for."""


def block() -> torch.Tensor:
    return torch.zeros(4 << 20, dtype=torch.uint8)  # more than the kernel's socket buffers take


def waiting(
    calls: ThreadPoolExecutor, group: GlooGroup, check: Callable[[], None] = lambda: None
) -> Future[None]:
    future = calls.submit(group.broadcast, block(), check)
    time.sleep(0.2)
    assert not future.done(), "it must wait for the member that does not take part"
    return future


def ends_at_once(future: Future[None], error: type[Exception], words: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=words):
        future.result(TIMEOUT_S)
    assert time.monotonic() - start < AT_ONCE_S


@pytest.mark.parametrize("rank", [0, 2])
def test_an_abort_ends_the_wait_for_a_member_that_hangs(
    calls: ThreadPoolExecutor, groups: list[GlooGroup], rank: int
) -> None:
    # Rank 2 hangs when the publisher waits, the publisher when a receiver does.
    future = waiting(calls, groups[rank])
    groups[rank].abort()
    ends_at_once(future, BrokenGroup, "aborted")
    start = time.monotonic()
    with pytest.raises(BrokenGroup, match="aborted"):
        groups[rank].broadcast(block())
    groups.clear()  # nobody waits for Gloo's own thread, which is still in there
    assert time.monotonic() - start < AT_ONCE_S


def test_a_publisher_whose_call_has_failed_waits_for_nobody(
    calls: ThreadPoolExecutor, groups: list[GlooGroup]
) -> None:
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise OSError("the fleet has given the round up")

    future = waiting(calls, groups[0], check)
    failed.set()
    ends_at_once(future, OSError, "given the round up")


def test_a_member_that_ends_breaks_the_broadcast_of_the_others(
    calls: ThreadPoolExecutor, groups: list[GlooGroup]
) -> None:
    future = waiting(calls, groups[0])
    groups[1].abort()
    groups[2].abort()
    ends_at_once(future, BrokenGroup, "broke")


def test_a_meeting_to_which_not_all_come_is_broken() -> None:
    meeting = info()
    meeting.timeout_s = 1.0
    with pytest.raises(BrokenGroup, match="3 members were expected at"):
        GlooGroup(meeting, 0, go_on)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_is_waited_for_no_longer_when_there_is_nothing_to_wait_for(
    calls: ThreadPoolExecutor, rank: int
) -> None:
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise BrokenGroup("given up")

    future = calls.submit(GlooGroup, info(), rank, check)
    time.sleep(0.3)
    assert not future.done()
    over.set()
    ends_at_once(future, BrokenGroup, "given up")
