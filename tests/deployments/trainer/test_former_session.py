"""A worker that was killed while it published blocks nobody."""

import pytest

from deployments.errors import Conflict, StalePublisher
from deployments.protocol.publishing import RoundOptions
from deployments.trainer.former_session import end_former_session
from deployments.trainer.spec import PUBLISHER
from tests.deployments.fake_controller import FakeController

pytestmark = pytest.mark.asyncio


def publishing(controller: FakeController) -> tuple[int, int]:
    """A worker has a round open, and dies: its token, and the round."""
    token = controller.on_acquire(PUBLISHER).token
    controller.on_connect(token, {})
    return token, controller.on_open_round(token, RoundOptions())


async def test_another_publisher_may_publish_at_once() -> None:
    controller = FakeController()
    publishing(controller)
    with pytest.raises(Conflict):
        controller.on_acquire("http")
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.open_round_id is None and controller.on_acquire("http").publisher == "http"


async def test_a_call_of_the_dead_worker_that_comes_late_is_refused() -> None:
    controller = FakeController()
    token, round_id = publishing(controller)
    await end_former_session(controller)  # type: ignore[arg-type]
    with pytest.raises(StalePublisher):
        controller.on_close_round(controller.on_renew(token).token, round_id, None)


async def test_another_publishers_lease_is_left_alone() -> None:
    controller = FakeController()
    held = controller.on_acquire("http")
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.lease == held and controller.calls == ["fleet"]


async def test_a_round_that_was_closed_is_left_alone() -> None:
    controller = FakeController()
    _, round_id = publishing(controller)
    controller.round_phase = "verifying"
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.open_round_id == round_id and controller.calls == ["fleet"]


async def test_nothing_is_asked_for_where_nobody_holds_the_lease() -> None:
    controller = FakeController()
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet"]


async def test_a_controller_that_refuses_does_not_keep_the_trainer_from_starting() -> None:
    controller = FakeController()
    publishing(controller)
    controller.dies_in["release"] = "after"
    await end_former_session(controller)  # type: ignore[arg-type]
