from collections.abc import Sequence

import pytest

from deployments.protocol.errors import DeadlyRequest
from deployments.router.deadly_requests import MAX_REMEMBERED, REFUSED_FOR_S, DeadlyRequests, RequestIdentity
from tests.clock import Clock


def identity(body: bytes = b"{}", path: str = "/v1/completions", method: str = "POST") -> RequestIdentity:
    return RequestIdentity(method, path, body)


def refuse(deadly: DeadlyRequests, request: RequestIdentity, replicas: Sequence[str] = ("a", "b")) -> None:
    with pytest.raises(DeadlyRequest):
        deadly.lost(request, replicas)


def test_all_requests_that_lose_the_same_replica_are_retried() -> None:
    deadly = DeadlyRequests(Clock())
    for _ in range(100):  # also where their bodies are equal
        deadly.lost(identity(), ["a"])
    for number in range(100):
        deadly.lost(identity(b"%d" % number), ["a"])
    deadly.check(identity())
    assert len(deadly) == 0


def test_request_is_refused_after_its_second_loss() -> None:
    with pytest.raises(DeadlyRequest, match=r"2 replicas were lost under this request \(a, b\)") as raised:
        DeadlyRequests(Clock()).lost(identity(), ["a", "b"])
    assert raised.value.status == 422
    assert raised.value.detail == {"replicas": ["a", "b"], "refused_for_s": REFUSED_FOR_S}


def test_repetition_is_refused_for_ten_minutes() -> None:
    clock = Clock()
    deadly = DeadlyRequests(clock)
    refuse(deadly, identity())
    clock.now += REFUSED_FOR_S - 1
    with pytest.raises(DeadlyRequest, match="refused for 1 s") as raised:
        deadly.check(identity())
    assert raised.value.detail == {"refused_for_s": 1.0}
    clock.now += 1
    deadly.check(identity())


def test_request_without_a_body_is_refused_but_not_remembered() -> None:
    deadly = DeadlyRequests(Clock())
    with pytest.raises(DeadlyRequest) as raised:
        deadly.lost(identity(b"", "/v1/models", "GET"), ["a", "b"])
    assert raised.value.detail["refused_for_s"] == 0
    deadly.check(identity(b"", "/v1/models", "GET"))


@pytest.mark.slow
def test_memory_of_refused_requests_is_bounded() -> None:
    clock = Clock()
    deadly = DeadlyRequests(clock)
    for number in range(MAX_REMEMBERED + 1):
        clock.now += 0.001
        refuse(deadly, identity(b"%d" % number))
    assert len(deadly) == MAX_REMEMBERED
    deadly.check(identity(b"0"))
    with pytest.raises(DeadlyRequest):
        deadly.check(identity(b"1"))
    clock.now += REFUSED_FOR_S
    refuse(deadly, identity(b"new"))
    assert len(deadly) == 1


def test_stream_that_loses_two_replicas_is_refused() -> None:
    clock = Clock()
    deadly = DeadlyRequests(clock)
    assert not any(deadly.cut_off(identity(), "a") for _ in range(100)), "all that ran on one replica"
    deadly.check(identity())
    clock.now += REFUSED_FOR_S - 1
    assert deadly.cut_off(identity(), "b")
    with pytest.raises(DeadlyRequest, match="refused for 600 s"):
        deadly.check(identity())
    deadly.check(identity(b"other"))


@pytest.mark.slow
def test_memory_of_cut_off_streams_is_bounded_and_ignores_empty_bodies() -> None:
    deadly = DeadlyRequests(Clock())
    for number in range(MAX_REMEMBERED + 1):
        deadly.cut_off(identity(b"%d" % number), "a")
    assert len(deadly) == MAX_REMEMBERED
    assert not deadly.cut_off(identity(b"0"), "b"), "the oldest is forgotten"
    assert deadly.cut_off(identity(b"2"), "b")
    assert not any(deadly.cut_off(identity(b""), name) for name in "abc")
