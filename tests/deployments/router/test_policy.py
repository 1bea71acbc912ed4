"""In which order replicas are tried."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.request_headers import Demand
from deployments.router.policy import Candidate, eligible_loads, order_candidates

FLEET = [Candidate(replica_id=f"r{i}", version=5, admitted=True) for i in range(5)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


def flat(groups: list[list[str]]) -> list[str]:
    return [replica_id for group in groups for replica_id in group]


def without(replica_id: str) -> list[Candidate]:
    return [candidate for candidate in FLEET if candidate.replica_id != replica_id]


def test_replicas_that_are_not_admitted_are_left_out() -> None:
    joiner = Candidate(replica_id="new", version=5, admitted=False)
    assert order_candidates([joiner, FLEET[0]], Demand()) == [["r0"]]
    assert order_candidates([joiner], Demand()) == []


def test_replicas_that_refused_the_request_come_last() -> None:
    assert order_candidates(FLEET[:2], Demand(refused=("r0",))) == [["r1"], ["r0"]]
    old = Candidate(replica_id="old", version=4, admitted=True)
    demand = Demand(min_version=5, refused=("r0",))
    assert order_candidates([*FLEET[:2], old], demand) == [["r1"], ["old"], ["r0"]]


def test_current_replicas_come_before_those_that_are_behind() -> None:
    fleet = [Candidate(replica_id="old", version=4, admitted=True), *FLEET[:1]]
    assert order_candidates(fleet, Demand(min_version=5)) == [["r0"], ["old"]]


def test_without_a_session_two_are_drawn() -> None:
    drawn = Counter(frozenset(order_candidates(FLEET, Demand())[0]) for _ in range(1000))
    assert {len(pair) for pair in drawn} == {2}
    assert len(drawn) == 10, "every pair of five"


def test_the_less_loaded_of_two_comes_first_by_what_all_routers_have_there() -> None:
    busy = Candidate(replica_id="busy", version=5, admitted=True, in_flight=3)
    idle = Candidate(replica_id="idle", version=5, admitted=True, in_flight=1)
    assert order_candidates([busy, idle], Demand()) == [["idle", "busy"]]
    assert order_candidates([busy, idle], Demand(in_flight={"idle": 3})) == [["busy", "idle"]]
    assert order_candidates([busy, idle], Demand(in_flight={"idle": 1})) == [["idle", "busy"]]


@given(st.text(min_size=1, max_size=20))
def test_a_session_stays_on_its_replica_while_that_is_there(session: str) -> None:
    demand = Demand(session_id=session)
    first, *others = flat(order_candidates(FLEET, demand))
    assert flat(order_candidates(list(reversed(FLEET)), demand))[0] == first
    for lost in others:
        assert flat(order_candidates(without(lost), demand))[0] == first, "the loss of another moves nobody"
    assert flat(order_candidates(without(first), demand)) == others, "its own loss moves it to the next"


def test_sessions_spread_over_the_fleet() -> None:
    firsts = Counter(flat(order_candidates(FLEET, Demand(session_id=str(i))))[0] for i in range(500))
    assert {60 < firsts[candidate.replica_id] < 140 for candidate in FLEET} == {True}


def test_a_preferred_replica_comes_first_unless_it_refused_or_is_not_admitted() -> None:
    behind = Candidate(replica_id="behind", version=4, admitted=True)
    demand = Demand(min_version=5, prefer="behind")
    assert flat(order_candidates([FLEET[0], behind], demand))[0] == "behind", "it is there in time"
    refused = Demand(prefer="r0", refused=("r0",))
    assert flat(order_candidates(FLEET[:2], refused)) == ["r1", "r0"]
    joiner = Candidate(replica_id="new", version=5, admitted=False)
    assert flat(order_candidates([joiner, FLEET[0]], Demand(prefer="new"))) == ["r0"]


def test_loads_are_of_the_replicas_that_may_answer() -> None:
    joiner = Candidate(replica_id="new", version=5, admitted=False)
    behind = Candidate(replica_id="behind", version=4, admitted=True, in_flight=2)
    demand = Demand(min_version=5, refused=("r1",), in_flight={"r0": 3, "r1": 9})
    assert eligible_loads([*FLEET[:2], behind, joiner], demand) == {"r0": 3, "behind": 2}
