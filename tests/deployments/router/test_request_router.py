"""The policy as Serve calls it."""

from types import SimpleNamespace
from typing import Any

from deployments.protocol.routing import Census, Choice, Demand
from deployments.router.request_router import FleetRequestRouter


def replica(name: str, **stats: object) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name), routing_stats=stats, replica_metadata={"address": name}
    )


def pending(*args: object) -> Any:
    return SimpleNamespace(args=list(args), routing_context=SimpleNamespace(should_backoff=False))


async def chosen(replicas: list[Any], request: Any) -> list[list[Any]]:
    router = FleetRequestRouter.__new__(FleetRequestRouter)  # Serve's own state plays no part in a choice
    return await router.choose_replicas(replicas, request)


async def test_demand_in_the_arguments_decides() -> None:
    old = replica("old", version=4, admitted=True, in_flight={})
    new = replica("new", version=5, admitted=True, in_flight={"r": 9})
    request = pending("other", Demand(min_version=5))
    assert await chosen([old, new], request) == [[new], [old]]
    assert request.routing_context.should_backoff, "Serve must not retry in a busy loop"
    assert await chosen([old, new], pending()) == [[old, new]]
    assert await chosen([old, new], None) == [[old, new]]


async def test_census_is_filled_in() -> None:
    census = Census()
    busy = replica("busy", version=5, admitted=True, in_flight={"r": 9})
    fenced = replica("fenced", admitted=False)
    await chosen([busy, replica("idle"), fenced], pending(Demand(census=census)))
    assert census.loads == {"busy": 9, "idle": 0}
    assert census.metadata == {name: {"address": name} for name in ("busy", "idle", "fenced")}


async def test_reported_load_of_the_asking_router_is_ignored() -> None:
    census = Census()
    busy = replica("busy", version=5, admitted=True, in_flight={"mine": 40, "others": 9})
    await chosen([busy], pending(Demand(census=census, router="mine", in_flight={"busy": 1})))
    assert census.loads == {"busy": 10}


async def test_version_of_the_chosen_replica_is_filled_in() -> None:
    choice = Choice()
    behind, current = replica("behind", version=4), replica("current", version=5)
    await chosen([behind, current], pending(Demand(min_version=5, choice=choice)))
    assert choice.version == 5
    await chosen([behind], pending(Demand(min_version=5, choice=choice)))
    assert choice.version == 4
    assert await chosen([replica("fenced", admitted=False)], pending(Demand(choice=choice))) == []


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
