"""A disk that is full or fails, and a controller that stands still."""

import asyncio
from pathlib import Path

import pytest

from deployments.controller.controller import Controller
from deployments.errors import FleetUnavailable
from deployments.protocol.operations import InFlight, Pause, Resume
from tests.deployments.controller.fleet import LONGER_THAN_ANY_DEADLINE_S, Fleet, publish
from tests.deployments.controller.full_disk import full_disk


async def test_a_controller_that_cannot_write_its_decisions_stops_answering(fleet: Fleet) -> None:
    fleet.start("a")
    await fleet.admitted("a")
    fleet.controller._durable._journal.close()
    with pytest.raises(FleetUnavailable, match="cannot write its decisions"):
        await fleet.controller.acquire("trainer")
    with pytest.raises(FleetUnavailable):
        await fleet.controller.check_health()


async def test_a_controller_that_stood_still_fences_nobody_and_takes_no_lease(fleet: Fleet) -> None:
    fleet.start("a", "b")
    await fleet.admitted("a", "b")
    lease = await fleet.controller.acquire("trainer")
    for replica_id in fleet.replicas:
        fleet.hang(replica_id)  # nobody can poll while the machine is frozen
    fleet.now += 10 * LONGER_THAN_ANY_DEADLINE_S
    await asyncio.sleep(0.1)  # several ticks
    assert len((await fleet.controller.fleet()).members) == 2
    assert (await fleet.controller.renew(lease.token)).token == lease.token
    stalls = [each for each in await fleet.controller.events() if each.name == "stall"]
    assert [each.fields["stalled_s"] for each in stalls] == [600.0]
    await fleet.elapse(6.0)
    await fleet.members(0)  # who does not come back after it is lost as ever


async def test_whatever_is_called_first_after_a_standstill_finds_its_lease(fleet: Fleet) -> None:
    lease = await fleet.controller.acquire("trainer")
    fleet.now += 10 * LONGER_THAN_ANY_DEADLINE_S
    assert (await fleet.controller.renew(lease.token)).token == lease.token


async def use_reserve(controller: Controller) -> None:
    """Until publishers are refused."""
    with pytest.raises(
        FleetUnavailable, match=r"cannot record updates: .*Free space on the disk of 'state_dir'"
    ):
        for _ in range(20):
            await controller.set_label("x" * 100_000)


async def test_on_a_full_disk_publishers_are_refused_and_serving_goes_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start("a", "b")
    await fleet.admitted("a", "b")
    with full_disk(tmp_path / "state"):
        await use_reserve(fleet.controller)
        for publisher in ("trainer", "trainer"):
            with pytest.raises(FleetUnavailable, match="the fleet serves on"):
                await fleet.controller.acquire(publisher)
        await fleet.polled("a", "b")
        await fleet.controller.check_health()
        fleet.start("c")  # what the ledger itself decides is still recorded
        await fleet.admitted("a", "b", "c")
        fleet.kill("c")
        await fleet.elapse(2.5)
        await fleet.members(2)
        assert await fleet.controller.call(Pause(mode=InFlight.KEEP)) and await fleet.controller.call(
            Resume()
        )
    assert (await publish(fleet)).version == 1


async def test_a_publisher_without_a_token_is_refused_before_its_round_opens(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start("a")
    await fleet.admitted("a")
    with full_disk(tmp_path / "state"):
        await use_reserve(fleet.controller)
        session = await fleet.controller.session("http")
        await fleet.controller.connect(session.token, {})
        with pytest.raises(FleetUnavailable, match="cannot record updates"):
            await fleet.controller.open_round(session.token)
        assert (await fleet.controller.fleet()).round is None and fleet.replicas["a"].admitted
    assert await fleet.controller.open_round(session.token) == 1


async def test_a_controller_restarts_on_a_full_disk(tmp_path: Path) -> None:
    before = Fleet(tmp_path)
    before.start("a")
    await before.admitted("a")
    await publish(before)
    await before.aclose()
    with full_disk(tmp_path / "state"):
        after = Fleet(tmp_path)
        try:
            after.start("a")
            after.replicas["a"].version = 1
            await after.admitted("a")
            assert (await after.controller.fleet()).committed_version == 1
        finally:
            await after.aclose()


async def test_a_controller_whose_disk_failed_lets_the_next_one_take_over(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.controller._durable._journal._file.close()
    with pytest.raises(FleetUnavailable, match="cannot write its decisions"):
        await fleet.controller.acquire("trainer")
    after = Fleet(tmp_path)
    await after.aclose()
