"""Gloo's group: every wait can be ended, long before its timeout."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.gloo import ABORTED, GlooGroup, chain
from deployments.weights.transports.rendezvous import rendezvous
from tests.deployments.weights.transports.rendezvous_info import info_for, no_check

TIMEOUT_S = 8.0
AT_ONCE_S = 2.0


@pytest.fixture
def calls() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield pool


@pytest.fixture
def groups(calls: ThreadPoolExecutor) -> list[GlooGroup]:
    info = info_for(3, TIMEOUT_S)
    return list(calls.map(lambda rank: GlooGroup(info, rank, no_check), range(3)))


def block() -> torch.Tensor:
    return torch.zeros(4 << 20, dtype=torch.uint8)  # larger than the kernel's socket buffers


def start_waiting(
    calls: ThreadPoolExecutor, group: GlooGroup, check: Callable[[], None] = no_check
) -> Future[None]:
    """A broadcast that waits for members that do not join it."""
    waits = threading.Event()

    def checked() -> None:  # called only after the broadcast has not finished for a while
        waits.set()
        check()

    future = calls.submit(group.broadcast, block(), checked)
    assert waits.wait(TIMEOUT_S) and not future.done()
    return future


def assert_ends_at_once(future: Future[Any], error: type[Exception], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        future.result(TIMEOUT_S)
    assert time.monotonic() - start < AT_ONCE_S


@pytest.mark.parametrize("rank", [0, 2])
def test_an_abort_ends_the_wait_for_a_member_that_hangs(
    calls: ThreadPoolExecutor, groups: list[GlooGroup], rank: int
) -> None:
    # Rank 2 hangs when the publisher waits, the publisher when a receiver does.
    future = start_waiting(calls, groups[rank])
    groups[rank].abort()
    assert_ends_at_once(future, TransferFailed, f"^{ABORTED}$")
    start = time.monotonic()
    with pytest.raises(TransferFailed, match=f"^{ABORTED}$"):
        groups[rank].broadcast(block())
    groups.clear()  # the destructor must not wait for Gloo's own thread, which is still in the broadcast
    assert time.monotonic() - start < AT_ONCE_S


def test_the_wait_for_a_neighbour_that_has_joined_and_died_can_be_ended(calls: ThreadPoolExecutor) -> None:
    info, died = info_for(2, TIMEOUT_S), threading.Event()

    def check() -> None:
        if died.is_set():
            raise TransferFailed(ABORTED)

    joining = calls.submit(rendezvous, info, 0, no_check, json.dumps(["127.0.0.1", 0]))
    future = calls.submit(GlooGroup, info, 1, check)
    joining.result(TIMEOUT_S)
    time.sleep(0.1)
    assert not future.done()
    died.set()
    assert_ends_at_once(future, TransferFailed, f"^{ABORTED}$")


def test_a_publisher_whose_call_has_failed_stops_waiting(
    calls: ThreadPoolExecutor, groups: list[GlooGroup]
) -> None:
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise OSError("the fleet has aborted the round")

    future = start_waiting(calls, groups[0], check)
    failed.set()
    assert_ends_at_once(future, OSError, r"^the fleet has aborted the round$")


def test_what_was_started_after_a_broadcast_that_failed_does_not_pass(
    calls: ThreadPoolExecutor, groups: list[GlooGroup]
) -> None:
    def check() -> None:
        raise OSError("the fleet has aborted the round")

    for index in range(2):
        groups[0].start(index, [block()], check if index == 0 else no_check)
    with pytest.raises(OSError, match=r"^the fleet has aborted the round$"):
        groups[0].wait(0)
    receiving = calls.submit(groups[1].broadcast, block())
    with pytest.raises(TransferFailed, match=f"^{ABORTED}$"):
        groups[0].wait(1)
    groups[1].abort()
    with pytest.raises(TransferFailed):
        receiving.result(TIMEOUT_S)


def test_the_publisher_sends_each_byte_once(calls: ThreadPoolExecutor, groups: list[GlooGroup]) -> None:
    """Its broadcast ends while the third rank, to which the second one sends, takes part in none."""
    second = start_waiting(calls, groups[1])
    groups[0].broadcast(block())
    assert not second.done()
    groups[1].abort()
    assert_ends_at_once(second, TransferFailed, f"^{ABORTED}$")


def test_ranks_of_one_host_are_neighbours_and_the_publisher_is_first() -> None:
    assert chain(["10.0.0.2", "10.0.0.1", "10.0.0.3", "10.0.0.1", "10.0.0.2"]) == [0, 4, 1, 3, 2]


def test_a_publisher_whose_name_does_not_resolve_is_a_wrong_address_and_not_a_slow_one() -> None:
    info = replace(info_for(2, TIMEOUT_S), master_address="trainer.invalid")
    wanted = (
        f"expected an IP address, or a name that {socket.gethostname()} can resolve, got 'trainer.invalid'"
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match=wanted):
        GlooGroup(info, 1, no_check)
    assert time.monotonic() - start < AT_ONCE_S


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_a_group_meets_over_ipv4_ipv6_and_a_name(calls: ThreadPoolExecutor, address: str) -> None:
    info = replace(info_for(2, TIMEOUT_S), master_address=address)
    first, second = calls.map(lambda rank: GlooGroup(info, rank, no_check), range(2))
    received = torch.zeros(3, dtype=torch.uint8)
    sent = calls.submit(first.broadcast, torch.tensor([1, 2, 3], dtype=torch.uint8))
    second.broadcast(received)
    sent.result(TIMEOUT_S)
    assert received.tolist() == [1, 2, 3]
