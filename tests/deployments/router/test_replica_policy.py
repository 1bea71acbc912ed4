import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocol.routing import Census, Choice, Demand
from deployments.router.replica_policy import (
    BYTES_PER_LOAD,
    FREE_LOAD,
    Candidate,
    eligible_loads,
    order_candidates,
)
from deployments.router.request_router import FleetRequestRouter

FLEET = [Candidate(replica_id=f"r{i}", version=5, admitted=True) for i in range(5)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


def flat(groups: list[list[str]]) -> list[str]:
    return [replica_id for group in groups for replica_id in group]


def chosen(fleet: list[Candidate], demand: Demand) -> str:
    """Serve takes the first."""
    return order_candidates(fleet, demand)[0][0]


def has(sizes: Mapping[str, int]) -> Callable[[int], list[tuple[int, list[str]]]]:
    """Which replicas have how many bytes of the prompt, at any version."""
    by_size: dict[int, list[str]] = {}
    for replica_id, size in sizes.items():
        by_size.setdefault(size, []).append(replica_id)
    return lambda version: sorted(by_size.items(), reverse=True)


def without(replica_id: str) -> list[Candidate]:
    return [candidate for candidate in FLEET if candidate.replica_id != replica_id]


def test_replicas_that_are_not_admitted_are_left_out() -> None:
    joiner = Candidate(replica_id="new", version=5, admitted=False)
    assert order_candidates([joiner, FLEET[0]], Demand()) == [["r0"]]
    assert order_candidates([joiner], Demand()) == []


def test_less_loaded_of_two_comes_first_by_what_all_routers_have_there() -> None:
    busy = Candidate(replica_id="busy", version=5, admitted=True, in_flight=3)
    idle = Candidate(replica_id="idle", version=5, admitted=True, in_flight=1)
    assert order_candidates([busy, idle], Demand()) == [["idle", "busy"]]
    assert order_candidates([busy, idle], Demand(in_flight={"idle": 3})) == [["busy", "idle"]]
    assert order_candidates([busy, idle], Demand(in_flight={"idle": 1})) == [["idle", "busy"]]


@pytest.mark.slow
@given(st.text(min_size=1, max_size=20))
def test_session_without_a_home_has_one_replica_for_all_routers(session: str) -> None:
    demand = Demand(session_id=session)
    first = chosen(FLEET, demand)
    assert chosen(list(reversed(FLEET)), demand) == first
    for candidate in FLEET:
        if candidate.replica_id != first:
            assert chosen(without(candidate.replica_id), demand) == first, "the loss of another moves nobody"
    assert len({chosen(without(first), demand) for _ in range(5)}) == 1, "its own loss moves it to one other"


def test_session_leaves_a_home_that_is_loaded_past_the_bound() -> None:
    demand = Demand(session_id="s", home="r0", load_factor=1.5)
    loads = {"r1": 20, "r2": 20, "r3": 20, "r4": 20}
    for load, stays in ((28, True), (35, False)):  # 1.5 times the mean is 32.4, or 34.5
        moved = chosen(FLEET, replace(demand, in_flight={**loads, "r0": load}))
        assert (moved == "r0") is stays
    few = replace(demand, in_flight={"r0": FREE_LOAD - 1})
    assert chosen(FLEET, few) == "r0", "so few are no load, whatever the others have"


def test_session_whose_state_is_in_a_replica_does_not_leave_it() -> None:
    at = chosen(FLEET, Demand(session_id="s"))
    loaded = Demand(session_id="s", in_flight={at: 1000}, load_factor=1.1)
    assert chosen(FLEET, loaded) != at
    assert chosen(FLEET, replace(loaded, stays=True)) == at
    assert chosen(FLEET, replace(loaded, stays=True, home="r0")) == at, (
        "for a router that has no home for it, too"
    )


def test_prefix_is_worth_some_load_and_no_more() -> None:
    cached = BYTES_PER_LOAD * 3
    for _ in range(20):
        near = Demand(holders=has({"r3": cached}), in_flight={"r3": 2})
        assert chosen(FLEET, near) == "r3"
        far = Demand(holders=has({"r3": cached}), in_flight={"r3": 4})
        assert chosen(FLEET, far) != "r3"


def test_of_the_holders_only_those_below_the_bound_are_compared() -> None:
    held = has({"r3": 10**6, "r1": 5 * 10**5})
    demand = Demand(
        holders=held, load_factor=1.25, in_flight={"r3": 40, "r1": 20, "r0": 20, "r2": 20, "r4": 20}
    )
    assert {chosen(FLEET, demand) for _ in range(20)} == {"r1"}


def test_prefixes_of_an_older_version_are_not_asked_for() -> None:
    asked: list[int] = []

    def holders(version: int) -> list[tuple[int, list[str]]]:
        asked.append(version)
        return []

    behind = replace(FLEET[0], version=4)
    order_candidates([behind, *FLEET[1:]], Demand(holders=holders))
    assert asked == [5]


def test_loads_are_of_the_replicas_that_may_answer() -> None:
    joiner = Candidate(replica_id="new", version=5, admitted=False)
    behind = Candidate(replica_id="behind", version=4, admitted=True, in_flight=2)
    demand = Demand(min_version=5, refused=("r1",), in_flight={"r0": 3, "r1": 9})
    assert eligible_loads([*FLEET[:2], behind, joiner], demand) == {"r0": 3, "behind": 2}


REPLICAS = st.lists(
    st.builds(
        Candidate,
        replica_id=st.sampled_from([f"r{i}" for i in range(9)]),
        version=st.integers(0, 3),
        admitted=st.booleans(),
        in_flight=st.integers(0, 50),
    ),
    max_size=9,
    unique_by=lambda each: each.replica_id,
)
NAMES = st.sampled_from([f"r{i}" for i in range(9)])
DEMANDS = st.builds(
    Demand,
    min_version=st.integers(0, 4),
    session_id=st.none() | st.text(max_size=3),
    stays=st.booleans(),
    home=st.none() | NAMES,
    holders=st.dictionaries(NAMES, st.integers(256, 100_000)).map(has),
    refused=st.lists(NAMES, max_size=3).map(tuple),
    in_flight=st.dictionaries(NAMES, st.integers(0, 50)),
    prefer=st.none() | NAMES,
    load_factor=st.floats(1.01, 1000),
)


@pytest.mark.slow
@given(REPLICAS, DEMANDS)
def test_order_of_candidates_keeps_its_rules(fleet: list[Candidate], demand: Demand) -> None:
    by_id = {each.replica_id: each for each in fleet if each.admitted}
    groups = order_candidates(fleet, demand)
    assert bool(groups) == bool(by_id), "somebody is chosen if anybody may answer"
    assert all(0 < len(group) <= 2 for group in groups)
    assert set(flat(groups)) <= by_id.keys()
    own = groups
    if demand.prefer in by_id and demand.prefer not in demand.refused:
        assert groups[0] == [demand.prefer]
        own = groups[1:]
    ranks = [
        {(each in demand.refused, by_id[each].version < demand.min_version) for each in group}
        for group in own
    ]
    assert all(len(rank) == 1 for rank in ranks), "a group has replicas of one kind"
    assert [rank.pop() for rank in ranks] == sorted(
        {(each in demand.refused, by_id[each].version < demand.min_version) for each in by_id}
    ), "current ones first, then those behind, and at last those that refused"


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=300), st.floats(1.05, 3), st.integers(2, 6)
)
def test_no_session_or_prefix_loads_a_replica_past_the_bound(
    requests: list[tuple[int, bool]], factor: float, replicas: int
) -> None:
    """Requests that never end, of few sessions and prompts: the worst that can come."""
    load = Counter[str]()
    homes: dict[int, str] = {}
    caches: dict[int, dict[str, int]] = {}
    for name, has_session in requests:
        before = dict(load)
        demand = Demand(
            session_id=f"s{name}" if has_session else None,
            home=homes.get(name),
            holders=has(caches.get(name, {})),
            in_flight=load,
            load_factor=factor,
        )
        at = chosen(FLEET[:replicas] if replicas < 6 else FLEET, demand)
        bound = max(FREE_LOAD, factor * sum(before.values()) / min(replicas, len(FLEET)))
        assert before.get(at, 0) < bound
        load[at] += 1
        homes[name] = at
        caches.setdefault(name, {})[at] = 10**6


# -- the policy as Serve calls it -------------------------------------------------------------------


def replica(name: str, **stats: object) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name), routing_stats=stats, replica_metadata={"address": name}
    )


def pending(*args: object) -> Any:
    return SimpleNamespace(args=list(args), routing_context=SimpleNamespace(should_backoff=False))


async def choices(replicas: list[Any], request: Any) -> list[list[Any]]:
    router = FleetRequestRouter.__new__(FleetRequestRouter)  # Serve's own state plays no part in a choice
    return await router.choose_replicas(replicas, request)


async def test_demand_in_the_arguments_decides() -> None:
    old = replica("old", version=4, admitted=True, in_flight={})
    new = replica("new", version=5, admitted=True, in_flight={"r": 9})
    request = pending("other", Demand(min_version=5))
    assert await choices([old, new], request) == [[new], [old]]
    assert request.routing_context.should_backoff, "Serve must not retry in a busy loop"
    assert await choices([old, new], pending()) == [[old, new]]
    assert await choices([old, new], None) == [[old, new]]


async def test_census_is_filled_in() -> None:
    census = Census()
    busy = replica("busy", version=5, admitted=True, in_flight={"r": 9})
    fenced = replica("fenced", admitted=False)
    await choices([busy, replica("idle"), fenced], pending(Demand(census=census)))
    assert census.loads == {"busy": 9, "idle": 0}
    assert census.metadata == {name: {"address": name} for name in ("busy", "idle", "fenced")}


async def test_reported_load_of_the_asking_router_is_ignored() -> None:
    census = Census()
    busy = replica("busy", version=5, admitted=True, in_flight={"mine": 40, "others": 9})
    await choices([busy], pending(Demand(census=census, router="mine", in_flight={"busy": 1})))
    assert census.loads == {"busy": 10}


async def test_version_of_the_chosen_replica_is_filled_in() -> None:
    choice = Choice()
    behind, current = replica("behind", version=4), replica("current", version=5)
    await choices([behind, current], pending(Demand(min_version=5, choice=choice)))
    assert choice.version == 5
    await choices([behind], pending(Demand(min_version=5, choice=choice)))
    assert choice.version == 4
    assert await choices([replica("fenced", admitted=False)], pending(Demand(choice=choice))) == []


async def test_new_statistics_and_another_router_are_seen() -> None:
    """Serve replaces the statistics of a replica in place, and makes a new list then."""
    router = FleetRequestRouter.__new__(FleetRequestRouter)
    one, other = replica("one", in_flight={"mine": 9}), replica("other", in_flight={"mine": 5})
    replicas = [one, other]
    for _ in range(2):
        assert await router.choose_replicas(replicas, pending(Demand())) == [[other, one]]
    ours = Demand(router="mine", in_flight={"other": 1})
    assert await router.choose_replicas(replicas, pending(ours)) == [[one, other]]
    other.routing_stats = {"in_flight": {"mine": 20}}
    assert await router.choose_replicas(list(replicas), pending(Demand())) == [[one, other]]
