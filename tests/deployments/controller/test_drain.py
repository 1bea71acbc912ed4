"""A drain over real polls: what the caller gets, and what is written about it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.protocol.engine_state import InFlight, Pause
from deployments.protocol.errors import Conflict, RoundAborted
from deployments.protocol.publishing import RoundOptions
from tests.deployments.controller.fleet import CONFIG, Fleet

PAUSE = Pause(mode=InFlight.WAIT)
TIMEOUT_S = 12.0  # of a drain


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, CONFIG.model_copy(update={"drain_timeout_s": TIMEOUT_S}))
    yield fleet
    await fleet.aclose()


async def drains(fleet: Fleet) -> None:
    await fleet.until(lambda: all(each.drains for each in fleet.replicas.values()))


async def test_a_pause_that_waits_is_answered_when_requests_have_ended(fleet: Fleet) -> None:
    fleet.start("a", "b")
    await fleet.admitted("a", "b")
    fleet.replicas["a"].take_requests(2)
    call = asyncio.create_task(fleet.controller.call(PAUSE))
    await drains(fleet)
    assert not call.done()
    fleet.replicas["a"].end_requests()
    assert set(await call) == {"a", "b"}
    await fleet.until(lambda: not any(each.drains for each in fleet.replicas.values()))


async def test_a_pause_past_its_drain_timeout_is_a_conflict_and_changes_nothing(fleet: Fleet) -> None:
    fleet.start("a", "b")
    await fleet.admitted("a", "b")
    fleet.replicas["a"].take_requests(2)
    call = asyncio.create_task(fleet.controller.call(PAUSE))
    await drains(fleet)
    for _ in range(int(TIMEOUT_S / 3) + 1):
        await fleet.elapse(3.0)
        await fleet.polled("a", "b")
    with pytest.raises(Conflict, match=r"requests still ran after drain_timeout_s = 12 s \(a: 2\)"):
        await call
    await fleet.until(lambda: not any(each.drains for each in fleet.replicas.values()))
    assert all(each.admitted and not each.condition for each in fleet.replicas.values())
    expired = [each.fields for each in await fleet.controller.events() if each.name == "drain_expired"]
    assert [(each["running"], each["then"]) for each in expired] == [({"a": 2}, "nothing changes")]


async def test_the_history_says_where_requests_still_ran(fleet: Fleet) -> None:
    fleet.start("a")
    await fleet.admitted("a")
    fleet.replicas["a"].take_requests(3)
    controller = fleet.controller
    lease = await controller.acquire("trainer")
    await controller.connect(lease.token, {})
    await controller.reconfigure({"in_flight": "wait", "drain_timeout_s": 2.0})
    round_id = await controller.open_round(lease.token, RoundOptions())
    await controller.send(lease.token, round_id, {})
    closing = asyncio.create_task(controller.close_round(lease.token, round_id))
    await drains(fleet)
    assert (await controller.fleet()).round is not None
    await fleet.elapse(4.0)
    with pytest.raises(RoundAborted, match=r"'in_flight' is 'wait', and requests still ran"):
        await closing
    (report,) = await controller.rounds()
    assert report.phase == "aborted" and report.not_drained == {"a": 3}
    assert fleet.replicas["a"].admitted and fleet.replicas["a"].version == 0
