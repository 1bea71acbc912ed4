import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments.calls.publish_session import (
    CALL_TIMEOUT_S,
    CLEAN_UP_TIMEOUT_S,
    PublishSession,
    joined,
    outcome,
)
from deployments.calls.rpc import RESTART_WAIT_S
from deployments.protocol import errors
from deployments.protocol.publishing import RoundOptions, RoundReport
from tests.app.http.fake_controller import FakeController, Handle
from tests.simulation.loop import Loop

LIMIT_S = 100_000.0


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run it on a loop whose time jumps to the next timer when nothing is ready."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        loop = Loop(executor=lambda *_: None, after_step=lambda: None)
        running = loop.create_task(test(*args, **fixtures))
        assert loop.run_until(running.done, LIMIT_S), "the test hangs"
        running.result()
        loop.close()

    return run


OPTIONS = RoundOptions()
ONE_ROUND = ["acquire", "connect", "open_round", "send", "close_round", "release"]
PUBLISHER = "http"


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


def session_of(controller: FakeController, publisher: str = "trainer") -> PublishSession:
    handle: Any = Handle(controller)
    return PublishSession(handle, publisher)


def join(controller: FakeController, **options: Any) -> Any:
    handle: Any = Handle(controller)
    return joined(handle, PUBLISHER, **options)


async def one_round(session: PublishSession, label: str | None = None) -> RoundReport:
    async with session:
        await session.connect({})
        await session.open(OPTIONS)
        await session.send({})
        return await session.close(label)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_time
async def test_a_round_has_one_lease_which_is_released_with_its_report(controller: FakeController) -> None:
    session = session_of(controller)
    assert (await one_round(session, "one")).label == "one"
    assert controller.calls == ONE_ROUND and controller.lease is None
    await one_round(session)
    assert controller.version == 5 and controller.lease is None


@virtual_time
async def test_a_second_publisher_is_refused_with_the_name_of_the_first(controller: FakeController) -> None:
    async with session_of(controller) as first:
        await first.acquire()
        with pytest.raises(errors.Conflict, match="'trainer' publishes"):
            await one_round(session_of(controller, "other"))
        with pytest.raises(errors.Conflict, match="'trainer' publishes"):
            await join(controller)
    await one_round(session_of(controller, "other"))


# -- the lease ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["connect", "open_round", "send"])
@virtual_time
async def test_the_lease_is_renewed_while_a_call_outlasts_it(controller: FakeController, method: str) -> None:
    controller.delay_s[method] = 2.5 * controller.lease_s
    await one_round(session_of(controller))
    assert [each for each in controller.calls if each != "renew"] == ONE_ROUND
    renewed = controller.calls.index(method) + 1
    assert controller.calls[renewed : renewed + 7] == ["renew"] * 7, "three times per duration of the lease"


@virtual_time
async def test_the_lease_is_renewed_while_the_publisher_waits_for_something_else(
    controller: FakeController,
) -> None:
    async with session_of(controller) as session:
        await session.acquire()
        await session.renewing(asyncio.sleep(1.1 * controller.lease_s))
    assert controller.calls == ["acquire", "renew", "renew", "renew", "release"]


@virtual_time
async def test_losing_the_lease_ends_the_pending_call(controller: FakeController) -> None:
    controller.delay_s["send"] = 10 * controller.lease_s
    controller.fail_next["renew"] = errors.StalePublisher("token 1 is stale")
    with pytest.raises(errors.StalePublisher, match="token 1 is stale"):
        await one_round(session_of(controller))
    assert now() == controller.lease_s / 3 and controller.sent == []
    assert controller.calls[-1] == "renew", "nothing is cleaned up under a stale token"


@pytest.mark.parametrize("fault", ["hangs", "lost"])
@virtual_time
async def test_a_renewal_without_an_answer_does_not_end_the_call(
    controller: FakeController, fault: str
) -> None:
    controller.delay_s["send"] = controller.lease_s / 3 + 1
    if fault == "hangs":
        controller.delay_s["renew"] = 3 * controller.lease_s
    else:
        controller.fail_next["renew"] = ActorDiedError()
    assert (await one_round(session_of(controller))).version == 4


# -- a round that fails ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [(errors.FleetUnavailable("too few"), "too few"), (asyncio.CancelledError(), "CancelledError")],
)
@virtual_time
async def test_an_exception_aborts_the_round_at_once_and_frees_the_lease(
    controller: FakeController, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)):
        async with session_of(controller, PUBLISHER) as session:
            await session.open(OPTIONS)
            raise error
    assert now() == 0 and controller.calls[-2:] == ["abort_round", "release"]
    assert reason in controller.reports[-1].reason
    assert (controller.round_id, controller.lease) == (None, None)


@virtual_time
async def test_without_a_round_an_exception_only_frees_the_lease(controller: FakeController) -> None:
    for calls in (["acquire", "release"], []):
        controller.calls.clear()
        with pytest.raises(ValueError, match="no"):
            async with session_of(controller) as session:
                if calls:
                    await session.acquire()
                raise ValueError("no")
        assert controller.calls == calls


@pytest.mark.parametrize("fault", [ActorDiedError(), errors.Conflict("round 1 is not open"), "hangs"])
@pytest.mark.parametrize("committed", [True, False])
@virtual_time
async def test_a_clean_up_that_fails_does_not_hide_the_outcome(
    controller: FakeController, fault: Exception | str, committed: bool
) -> None:
    for method in ("abort_round", "release"):
        if isinstance(fault, str):
            controller.delay_s[method] = 10 * CALL_TIMEOUT_S
        else:
            controller.fail_next[method] = fault
    if committed:
        assert (await one_round(session_of(controller))).version == 4
    else:
        controller.fail_next["send"] = errors.RoundAborted("replicas disagree")
        with pytest.raises(errors.RoundAborted, match="replicas disagree"):
            await one_round(session_of(controller))
    assert now() <= 2 * CLEAN_UP_TIMEOUT_S


@pytest.mark.parametrize("method", ["connect", "open_round", "send", "close_round"])
@virtual_time
async def test_a_controller_that_hangs_ends_the_call(controller: FakeController, method: str) -> None:
    controller.delay_s[method] = 10 * CALL_TIMEOUT_S
    kind = errors.AnswerLost if method == "close_round" else errors.FleetUnavailable
    with pytest.raises(kind, match=rf"{method}.*: no answer within 600 s"):
        await one_round(session_of(controller))
    assert now() == CALL_TIMEOUT_S and controller.lease is None


# -- a controller that dies --------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["connect", "open_round", "send"])
@virtual_time
async def test_a_round_whose_controller_dies_before_the_close_is_to_be_sent_again(
    controller: FakeController, method: str, when: str
) -> None:
    getattr(controller, f"dies_{when}").add(method)
    session = session_of(controller)
    with pytest.raises(errors.TransferAborted, match=f"lost during '{method}'") as caught:
        await one_round(session)
    assert caught.value.detail == {"send_again": True} and controller.calls[-1] == method
    assert (await one_round(session)).version == 4


@virtual_time
async def test_a_controller_that_dies_before_the_decision_has_aborted_the_round(
    controller: FakeController,
) -> None:
    controller.dies_before.add("close_round")
    with pytest.raises(errors.TransferAborted, match="the controller restarted"):
        await one_round(session_of(controller))
    assert controller.version == 3


@virtual_time
async def test_a_decided_round_is_not_reported_as_failed_when_its_controller_dies(
    controller: FakeController, caplog: pytest.LogCaptureFixture
) -> None:
    controller.dies_after.add("close_round")
    session = session_of(controller)
    with caplog.at_level("WARNING", "ray.serve"):
        report = await one_round(session, "mine")
    assert (report.version, report.label) == (4, "mine") and controller.calls.count("close_round") == 2
    assert [each.getMessage() for each in caplog.records] == [
        "close_round: the process is gone; retrying with its successor"
    ]
    assert (await one_round(session)).version == 5


@virtual_time
async def test_a_round_whose_close_nothing_answers_is_aborted_if_it_was_not_closed(
    controller: FakeController,
) -> None:
    controller.fail_next["close_round"] = errors.FleetUnavailable("no answer")  # and it never arrived
    with pytest.raises(errors.AnswerLost, match="round 4 may be committed") as caught:
        await one_round(session_of(controller))
    assert caught.value.detail == {"round_id": 4} and controller.lease is None
    fleet, ended = await controller.fleet(), await controller.rounds()
    with pytest.raises(errors.RoundAborted, match="round 4 was aborted: round 4 aborted by its publisher"):
        outcome(4, fleet.fleet_id, fleet, ended)
    with pytest.raises(errors.Conflict, match="whether round 4 of fleet other was committed is not known"):
        outcome(4, "other", fleet, ended)


@virtual_time
async def test_a_version_of_another_publisher_is_never_taken_for_ones_own(controller: FakeController) -> None:
    controller.dies_before.add("close_round")
    mine = asyncio.ensure_future(one_round(session_of(controller)))
    await asyncio.sleep(0.1)  # the successor is up, and another publisher is quicker than the question
    assert (await one_round(session_of(controller, "other"))).version == 4
    with pytest.raises(errors.TransferAborted):
        await mine


@virtual_time
async def test_an_acquire_and_a_join_are_asked_again_of_the_successor(controller: FakeController) -> None:
    controller.dies_before.add("acquire")
    assert (await one_round(session_of(controller))).version == 4
    controller.fail_next["join_lease"] = ActorDiedError()
    session = await join(controller)
    await session.connect({})


@virtual_time
async def test_the_wait_for_a_successor_is_bounded(controller: FakeController) -> None:
    class Dead(FakeController):
        async def acquire(self, publisher: str) -> Any:
            raise ActorDiedError

    with pytest.raises(errors.FleetUnavailable, match="acquire: no answer within 120 s"):
        await session_of(Dead()).acquire()
    assert now() == pytest.approx(RESTART_WAIT_S, abs=0.5)


# -- a publisher whose calls carry no token ----------------------------------------------------


@virtual_time
async def test_the_end_of_one_call_leaves_a_concurrent_one_its_lease_and_its_round(
    controller: FakeController,
) -> None:
    controller.delay_s["disconnect"] = 1.0

    async def call(method: str, *args: Any) -> None:
        session = await join(controller)
        await getattr(session, method)(*args)

    ending = asyncio.create_task(call("disconnect"))
    await asyncio.sleep(0.5)
    session = await join(controller)
    await ending
    await session.connect({})
    await session.open(OPTIONS)
    assert controller.lease is not None and controller.round_id == session.round_id
    session = await join(controller, of_round=True)
    await session.send({})
    await session.close()
    assert controller.lease is None


@virtual_time
async def test_a_joined_lease_is_held_between_calls_only_while_a_round_is_open(
    controller: FakeController,
) -> None:
    session = await join(controller)
    await session.connect({})
    assert controller.lease is None
    session = await join(controller)
    await session.open(OPTIONS)
    held = controller.lease
    assert held is not None and held.publisher == PUBLISHER
    session = await join(controller, of_round=True)
    await session.send({})
    assert controller.lease == held, "renewed, not acquired again: that would abort the round"
    session = await join(controller, of_round=True)
    await session.close()
    assert controller.lease is None and controller.version == 4


@virtual_time
async def test_only_a_call_of_the_round_renews_a_joined_lease(controller: FakeController) -> None:
    await (await join(controller)).open(OPTIONS)
    before = controller.renewals
    await join(controller)
    assert controller.renewals == before and controller.round_id is not None
    await join(controller, of_round=True)
    assert controller.renewals == before + 1


@virtual_time
async def test_concurrent_calls_share_a_joined_lease(controller: FakeController) -> None:
    session = await join(controller)
    await session.open(OPTIONS)
    controller.delay_s["send"] = 1.0

    async def send(number: int) -> None:
        session = await join(controller, of_round=True)
        await session.send(number)

    await asyncio.gather(*(send(number) for number in range(3)))
    assert len(controller.sent) == 3 and controller.lease is not None
