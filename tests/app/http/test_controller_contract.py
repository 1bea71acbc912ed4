"""What the routes rely on when they call the controller: the fake one and the real one refuse the same."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deployments.controller.controller import Controller
from deployments.ledger.ledger_config import LedgerConfig
from deployments.protocol.errors import Conflict, StalePublisher
from deployments.protocol.publishing import Lease
from tests.app.http.fake_controller import FakeController


@pytest.fixture(params=["fake", "real"])
async def controller(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeController()
        return
    real = Controller(
        config=LedgerConfig(),
        state_dir=str(tmp_path / "state"),
        store_dir=str(tmp_path / "store"),
        is_alive=lambda replica_id: True,
        kill=lambda replica_id: None,
    )
    yield real
    await real.aclose()


async def test_session_acquires_and_then_renews_the_same_lease(controller: Any) -> None:
    first = await controller.join_lease("http", False)
    assert (first.lease.token, first.round_id) == (1, None)
    assert (await controller.join_lease("http", True)).lease.token == first.lease.token
    assert (await controller.renew(first.lease.token)).publisher == "http"


async def test_lease_is_free_after_a_release(controller: Any) -> None:
    session = await controller.join_lease("http", False)
    await controller.release(session.lease.token)
    lease: Lease = await controller.acquire("trainer")
    assert lease.token > session.lease.token


async def test_lease_is_free_after_the_last_of_the_calls_that_joined_it(controller: Any) -> None:
    session = await controller.join_lease("http", False)
    await controller.join_lease("http", False)
    await controller.leave_lease("trainer", False)
    await controller.leave_lease("http", False)
    assert (await controller.renew(session.lease.token)).publisher == "http"
    await controller.leave_lease("http", True)
    assert (await controller.acquire("trainer")).token > session.lease.token
    await controller.leave_lease("http", False)
    assert (await controller.acquire("trainer")).publisher == "trainer"


async def test_another_publisher_is_a_conflict_that_names_the_holder(controller: Any) -> None:
    await controller.acquire("trainer")
    with pytest.raises(Conflict, match="'trainer'") as caught:
        await controller.join_lease("http", False)
    assert caught.value.detail["holder"] == "trainer"


async def test_acquired_lease_makes_the_older_token_stale(controller: Any) -> None:
    session = await controller.join_lease("http", False)
    await controller.acquire("http")
    for call in (controller.renew(session.lease.token), controller.release(session.lease.token)):
        with pytest.raises(StalePublisher, match=f"token {session.lease.token} is stale"):
            await call
    with pytest.raises(StalePublisher):
        await controller.send(session.lease.token, 1, {})
    with pytest.raises(StalePublisher):
        await controller.close_round(session.lease.token, 1, None)


@pytest.mark.parametrize("method", ["send", "close_round"])
async def test_round_that_is_not_open_is_a_conflict(controller: Any, method: str) -> None:
    session = await controller.join_lease("http", False)
    argument: Any = {} if method == "send" else None
    with pytest.raises(Conflict):
        await getattr(controller, method)(session.lease.token, 7, argument)
