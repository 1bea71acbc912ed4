import asyncio
from pathlib import Path

import pytest

from deployments.controller.controller import Controller
from deployments.protocol.engine_state import InFlight, Pause, Resume
from deployments.protocol.errors import FleetUnavailable
from tests.deployments.controller.fleet import LONGER_THAN_ANY_DEADLINE_S, Fleet, publish
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.full_disk import full_disk, longest_in


async def test_a_text_that_is_not_utf_8_is_escaped_in_the_journal_and_no_failed_disk(fleet: Fleet) -> None:
    await fleet.controller.acquire("half a surrogate: \udce9")
    await fleet.controller.check_health()
    await fleet.restart()
    assert (await fleet.controller.acquire("trainer")).token == 2


async def test_a_stalled_controller_fences_no_replica_and_expires_no_lease(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
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


async def test_the_first_call_after_a_stall_finds_its_lease(fleet: Fleet) -> None:
    lease = await fleet.controller.acquire("trainer")
    fleet.now += 10 * LONGER_THAN_ANY_DEADLINE_S
    assert (await fleet.controller.renew(lease.token)).token == lease.token


async def test_replicas_are_heard_and_answered_while_the_disk_is_slow(fleet: Fleet) -> None:
    await fleet.serve("a", "b")
    fleet.disk.goes.clear()
    acquiring = asyncio.create_task(fleet.controller.acquire("trainer"))
    await fleet.polled("a", "b")  # heartbeats that say nothing new
    status = asyncio.create_task(fleet.controller.fleet())
    assert not (await asyncio.wait({acquiring, status}, timeout=0.2))[0], "learned of what may be lost"
    fleet.disk.goes.set()
    lease = (await status).lease
    assert (await acquiring).token == 1 and lease is not None and lease.publisher == "trainer"


async def test_no_replica_learns_of_a_decision_that_is_not_on_the_disk(fleet: Fleet) -> None:
    await fleet.serve("a")
    fleet.hang("a")  # polled by hand from here on
    publishing = asyncio.create_task(publish(fleet))
    replica = fleet.replicas["a"]
    while "verify" not in replica.names():
        replica.take(await fleet.controller.poll(replica.report()))
    fleet.disk.goes.clear()
    first = asyncio.create_task(fleet.controller.poll(replica.report()))  # acknowledges: the round is decided
    assert not (await asyncio.wait({first}, timeout=0.2))[0]
    again = asyncio.create_task(fleet.controller.poll(replica.report()))  # and asks once more meanwhile
    assert not (await asyncio.wait({first, again}, timeout=0.2))[0] and replica.version == 0
    fleet.disk.goes.set()
    replica.take(await again)
    assert replica.version == 1
    await asyncio.gather(first, return_exceptions=True)
    while not publishing.done():
        replica.take(await fleet.controller.poll(replica.report()))
    assert (await publishing).version == 1


async def test_while_the_journal_is_not_in_its_place_publishers_are_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    """A successor would begin a new fleet."""
    await fleet.serve("a")
    await publish(fleet)
    (tmp_path / "state").rename(tmp_path / "aside")
    with pytest.raises(FleetUnavailable, match="is not there any more: put it back"):
        while True:
            await fleet.controller.acquire("trainer")
            await asyncio.sleep(0.01)
    await fleet.polled("a")
    await fleet.controller.check_health()
    fleet.add(FakeReplica(replica_id="b", incarnation="b-1", version=1))
    await fleet.admitted("a", "b")  # what the ledger itself decides is still recorded
    (tmp_path / "aside").rename(tmp_path / "state")
    await publish(fleet)
    await fleet.restart("a", "b")
    status = await fleet.controller.fleet()
    assert status.committed_version == 2 and len(status.members) == 2


async def use_reserve(controller: Controller) -> None:
    """Until publishers are refused."""
    await controller.set_label("x" * 600_000)
    with pytest.raises(
        FleetUnavailable, match=r"cannot record updates: .*Free space on the disk of 'state_dir'"
    ):
        await controller.set_label("x")


async def test_on_a_full_disk_publishers_are_refused_and_serving_continues(
    fleet: Fleet, tmp_path: Path
) -> None:
    await fleet.serve("a", "b")
    with full_disk(longest_in(tmp_path / "state")):
        await use_reserve(fleet.controller)
        for publisher in ("trainer", "trainer"):
            with pytest.raises(FleetUnavailable, match="Serving continues"):
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
    await fleet.serve("a")
    with full_disk(longest_in(tmp_path / "state")):
        await use_reserve(fleet.controller)
        token = (await fleet.controller.join_lease("http", False)).lease.token
        await fleet.controller.connect(token, {})
        with pytest.raises(FleetUnavailable, match="cannot record updates"):
            await fleet.controller.open_round(token)
        assert (await fleet.controller.fleet()).round is None and fleet.replicas["a"].admitted
    assert await fleet.controller.open_round(token) == 1


async def test_a_controller_restarts_on_a_full_disk(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.serve("a")
    await publish(fleet)
    with full_disk(longest_in(tmp_path / "state")):
        await fleet.restart()
        await fleet.polled("a")
        assert fleet.replicas["a"].admitted
        assert (await fleet.controller.fleet()).committed_version == 1


async def test_a_controller_whose_disk_failed_stops_answering_and_lets_the_next_one_take_over(
    fleet: Fleet, tmp_path: Path
) -> None:
    await fleet.serve("a")
    fleet.controller._durable._journal._db.close()
    with pytest.raises(FleetUnavailable, match="cannot write its decisions"):
        await fleet.controller.acquire("trainer")
    with pytest.raises(FleetUnavailable):
        await fleet.controller.check_health()
    after = Fleet(tmp_path)
    await after.aclose()
