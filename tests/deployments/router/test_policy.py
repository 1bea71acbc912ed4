from hypothesis import given
from hypothesis import strategies as st

from deployments.request_headers import Demand
from deployments.router.policy import Candidate, rank

FLEET = [Candidate(replica_id=f"r{i}", version=5, admitted=True) for i in range(5)]


def flat(ranks: list[list[str]]) -> list[str]:
    return [name for group in ranks for name in group]


def test_replicas_that_are_not_admitted_are_left_out_and_those_that_have_refused_come_last() -> None:
    fleet = [*FLEET[:2], Candidate(replica_id="new", version=5, admitted=False)]
    assert flat(rank(fleet, Demand(refused=("r0",)))) == ["r1", "r0"]
    assert rank(fleet[2:], Demand()) == []


def test_fresh_replicas_come_before_those_that_are_behind() -> None:
    fleet = [Candidate(replica_id="old", version=4, admitted=True), *FLEET[:1]]
    assert rank(fleet, Demand(min_version=5)) == [["r0"], ["old"]]


def test_without_a_session_two_are_drawn() -> None:
    drawn = {tuple(sorted(rank(FLEET, Demand())[0])) for _ in range(200)}
    assert all(len(pair) == 2 for pair in drawn) and len(drawn) > 5


@given(st.text(min_size=1, max_size=20))
def test_a_session_keeps_its_home_while_it_is_there(session: str) -> None:
    demand = Demand(session_id=session)
    home, *others = flat(rank(FLEET, demand))
    assert flat(rank(list(reversed(FLEET)), demand))[0] == home
    for gone in others:  # the loss of another replica moves nobody
        assert flat(rank([c for c in FLEET if c.replica_id != gone], demand))[0] == home
    moved = flat(rank([c for c in FLEET if c.replica_id != home], demand))
    assert moved == others, "and the loss of its own moves it to the next in line"


def test_sessions_spread_over_the_fleet() -> None:
    homes = [flat(rank(FLEET, Demand(session_id=str(i))))[0] for i in range(500)]
    assert all(60 < homes.count(candidate.replica_id) < 140 for candidate in FLEET)
