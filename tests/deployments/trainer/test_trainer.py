"""Calls in turn, and callers that go away."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from deployments.errors import Conflict, FleetUnavailable, StalePublisher
from deployments.protocol.instructions import Verify
from deployments.protocol.publishing import RoundOptions
from deployments.protocol.status import FleetStatus, MemberStatus, RoundStatus
from deployments.trainer.spec import PUBLISHER
from deployments.trainer.trainer import CONFIRMATIONS, Turns, end_former_session, is_lost, is_starved, watch
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.ledger.ledger_scene import Scene


async def test_calls_run_one_at_a_time_in_their_order() -> None:
    turns, did = Turns(), []

    async def work(number: int) -> int:
        did.append(f"{number} begins")
        await asyncio.sleep(0)
        did.append(f"{number} ends")
        return number

    calls = [turns.take("step", lambda number=number: work(number)) for number in range(3)]
    assert await asyncio.gather(*calls) == [0, 1, 2]
    assert did == [f"{number} {word}" for number in range(3) for word in ("begins", "ends")]
    assert turns.doing is None and turns.doing_s == 0.0


async def test_a_call_that_has_begun_goes_on_without_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    turns, may_end = Turns(), asyncio.Event()
    steps = 0

    async def step() -> None:
        nonlocal steps
        await may_end.wait()
        steps += 1

    caller = asyncio.create_task(turns.take("step", step))
    await asyncio.sleep(0.01)
    with caplog.at_level("WARNING", "ray.serve"):
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    # A writer of an earlier test's trainer may still say that it has ended.
    assert [each.getMessage() for each in caplog.records if each.module == "turns"] == [
        "the caller of 'step' is gone: the trainer goes on with it"
    ]
    assert turns.doing == "step", "the status says that it is not over"
    following = asyncio.create_task(turns.take("step", step))
    await asyncio.sleep(0.01)
    may_end.set()
    await following
    assert steps == 2


async def test_a_call_that_waits_ends_with_its_caller() -> None:
    turns, may_end = Turns(), asyncio.Event()
    did = []

    async def note(name: str) -> None:
        did.append(name)

    first = asyncio.create_task(turns.take("publish", may_end.wait))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(turns.take("step", lambda: note("step")))
    await asyncio.sleep(0.01)
    waiting.cancel()
    may_end.set()
    await first
    await turns.take("save", lambda: note("save"))
    assert did == ["save"]


async def test_what_fails_without_its_caller_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    turns, may_end = Turns(), asyncio.Event()

    async def fail() -> None:
        await may_end.wait()
        raise ValueError("out of memory")

    caller = asyncio.create_task(turns.take("step", fail))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.sleep(0.01)
    with caplog.at_level("WARNING", "ray.serve"):
        may_end.set()
        await asyncio.sleep(0.01)
    assert caplog.records[-1].getMessage() == "a call whose caller is gone has failed: out of memory"
    assert turns.doing is None


async def test_what_a_call_raises_is_its_callers() -> None:
    async def fail() -> None:
        raise ValueError("wrong batch")

    turns = Turns()
    with pytest.raises(ValueError, match="wrong batch"):
        await turns.take("step", fail)
    assert turns.doing is None


ROUND = RoundStatus(round_id=5, version=5, label=None, phase="open", age_s=1.0, participants=("r0",))


def fleet(
    *members: tuple[str, int],
    committed: int = 4,
    stored: int | None = 3,
    current_round: RoundStatus | None = None,
) -> FleetStatus:
    return replace(
        Scene().status(),
        committed_version=committed,
        stored_version=stored,
        round=current_round,
        members=tuple(
            MemberStatus(
                replica_id=f"r{index}",
                incarnation=f"r{index}-1",
                state=state,
                admitted=state == "serving",
                version=version,
                world_size=1,
                silent_s=0.0,
                pending=(),
                reason="",
            )
            for index, (state, version) in enumerate(members)
        ),
    )


LOST = fleet(("joining", 3), ("joining", 3))
SERVED = fleet(("serving", 4))


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        (LOST, True),
        (fleet(("joining", 0), stored=None), True),
        (fleet(("joining", 3), ("fenced", 3)), True),
        (fleet(("joining", 3), stored=4), False),  # it catches up from the store
        (fleet(("joining", 3), ("serving", 4)), False),  # one has it, and may be writing it to the store
        (fleet(("joining", 4)), False),  # about to be admitted
        (fleet(("joining", 0), committed=0, stored=None), False),  # version 0 is the checkpoint
        (fleet(), False),  # no replica waits
        (fleet(("joining", 3), current_round=ROUND), False),  # the round brings a newer version
    ],
)
def test_a_version_is_lost_when_joiners_wait_for_what_nobody_has(status: FleetStatus, lost: bool) -> None:
    assert is_lost(status) is lost


STARVED = replace(fleet(("joining", 3), ("serving", 4)), store_problem="version 4 is not in the store")


@pytest.mark.parametrize(
    ("status", "published", "starved"),
    [
        (STARVED, 4, True),
        (STARVED, 3, False),  # another publisher's: the trainer's weights would take its place
        (replace(STARVED, store_problem=None), 4, False),  # not for long yet
        (replace(STARVED, round=ROUND), 4, False),
        (replace(SERVED, store_problem="version 4 is not in the store"), 4, False),  # nobody waits for it
    ],
)
def test_joiners_starve_when_only_replicas_hold_what_the_trainer_published(
    status: FleetStatus, published: int, starved: bool
) -> None:
    assert is_starved(status, published) is starved and not is_lost(status)


async def labels_published(statuses: Sequence[FleetStatus | Exception], publish_fails: int = 0) -> list[str]:
    """What `watch` publishes while the controller gives these answers, one per check."""
    answers: Iterator[FleetStatus | Exception] = iter(statuses)
    published: list[str] = []
    exhausted = asyncio.Event()

    async def status() -> FleetStatus:
        answer = next(answers, None)
        if answer is None:
            exhausted.set()
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    async def publish(label: str) -> None:
        published.append(label)
        if len(published) <= publish_fails:
            raise FleetUnavailable("no replica is registered")

    watching = asyncio.create_task(watch(status, publish, lambda: 4, period_s=0.0))
    await exhausted.wait()
    watching.cancel()
    return published


async def test_a_version_that_is_lost_in_several_checks_in_a_row_is_published_anew() -> None:
    assert await labels_published([LOST] * CONFIRMATIONS) == ["version 4 was lost"]
    assert await labels_published([LOST] * (CONFIRMATIONS - 1)) == []


async def test_a_version_that_never_reached_the_store_is_published_anew_for_those_who_wait() -> None:
    assert await labels_published([STARVED] * CONFIRMATIONS) == ["version 4 was not stored"]
    assert await labels_published([STARVED] * (CONFIRMATIONS - 1)) == []


async def test_a_store_that_is_written_in_time_needs_no_new_version() -> None:
    assert await labels_published([LOST, LOST, SERVED, LOST, LOST]) == []


async def test_the_watch_survives_an_unreachable_controller_and_a_failed_round() -> None:
    unreachable = FleetUnavailable("the controller is away")
    checks: list[FleetStatus | Exception] = [LOST, LOST, unreachable, LOST]
    assert await labels_published(checks) == ["version 4 was lost"], "a missed check resets nothing"
    assert await labels_published([LOST] * 6, publish_fails=1) == ["version 4 was lost"] * 2


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
