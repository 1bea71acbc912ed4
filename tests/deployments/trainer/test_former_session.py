"""A worker that was killed while it published blocks nobody."""

import asyncio

import pytest

from deployments.protocol.errors import Conflict, StalePublisher
from deployments.protocol.poll import Verify
from deployments.protocol.publishing import RoundOptions
from deployments.trainer.spec import PUBLISHER
from deployments.trainer.trainer import end_former_session
from tests.deployments.controller_in_process import ControllerInProcess

pytestmark = pytest.mark.asyncio


def publishing(controller: ControllerInProcess) -> tuple[int, int]:
    """A worker has a round open, and dies: its token, and the round."""
    token = controller.ask("acquire", PUBLISHER).token
    controller.ask("connect", token, {})
    return token, controller.ask("open_round", token, RoundOptions())


async def test_another_publisher_may_publish_at_once(controller: ControllerInProcess) -> None:
    publishing(controller)
    with pytest.raises(Conflict):
        controller.ask("acquire", "http")
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.status.round is None and controller.ask("acquire", "http").publisher == "http"


async def test_a_call_of_the_dead_worker_that_comes_late_is_refused(controller: ControllerInProcess) -> None:
    token, round_id = publishing(controller)
    await end_former_session(controller)  # type: ignore[arg-type]
    with pytest.raises(StalePublisher):
        controller.ask("send", token, round_id, {})


async def test_another_publishers_lease_is_left_alone(controller: ControllerInProcess) -> None:
    held = controller.ask("acquire", "http")
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.ask("renew", held.token) == held and controller.calls == ["fleet"]


async def test_a_round_that_was_closed_is_left_alone(controller: ControllerInProcess) -> None:
    token, round_id = publishing(controller)
    controller.ask("send", token, round_id, {})
    controller.replica.hangs_in.add(Verify)
    closing = asyncio.create_task(asyncio.to_thread(controller.ask, "close_round", token, round_id, None))
    while controller.status.round.phase == "open":
        await asyncio.sleep(0.01)
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet"]
    controller.replica.hangs_in.clear()
    assert (await closing).phase == "committed"


async def test_nothing_is_asked_for_where_nobody_holds_the_lease(controller: ControllerInProcess) -> None:
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet"]


async def test_a_controller_that_refuses_does_not_keep_the_trainer_from_starting(
    controller: ControllerInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    publishing(controller)
    controller.fails["acquire"] = Conflict("not now")
    with caplog.at_level("WARNING", "ray.serve"):
        await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet", "acquire"]
    assert "what a former trainer left behind is not cleaned up: not now" in caplog.text


async def test_replicas_close_the_memory_that_they_share_with_the_trainer(
    controller: ControllerInProcess,
) -> None:
    publishing(controller)
    await end_former_session(controller, shares_memory=True)  # type: ignore[arg-type]
    assert controller.calls == ["acquire", "disconnect", "release"] and controller.status.connection is None
