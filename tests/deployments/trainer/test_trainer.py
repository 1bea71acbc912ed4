import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from deployments.protocol.errors import Conflict, FleetUnavailable, StalePublisher
from deployments.protocol.poll import InitialWeights, Verify
from deployments.protocol.publishing import RoundOptions
from deployments.protocol.responses import FleetStatus, RolloutSample, RoundStatus, StepEntry
from deployments.serve.instruments import STEP, STEPS
from deployments.trainer.spec import PUBLISHER, LoadedTrainer
from deployments.trainer.trainer import (
    CONFIRMATIONS,
    SerialQueue,
    StepHistory,
    check_version_0,
    count_step,
    is_lost,
    is_starved,
    watch,
)
from deployments.trainer.trainer_rounds import end_former_session
from tests.app.http.fake_status import status
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.recorded import Recorded

# -- the serial queue ------------------------------------------------------------------------------


async def test_calls_run_one_at_a_time_in_order() -> None:
    queue, did = SerialQueue(), []

    async def work(number: int) -> int:
        did.append(f"{number} begins")
        await asyncio.sleep(0)
        did.append(f"{number} ends")
        if number == 2:
            raise ValueError("wrong batch")
        return number

    calls = [queue.run("step", lambda number=number: work(number)) for number in range(3)]
    *results, error = await asyncio.gather(*calls, return_exceptions=True)
    assert results == [0, 1] and str(error) == "wrong batch"
    assert did == [f"{number} {word}" for number in range(3) for word in ("begins", "ends")]
    assert queue.doing is None and queue.doing_s == 0.0


async def test_a_call_that_has_begun_continues_when_its_caller_disconnects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, may_end, did = SerialQueue(), asyncio.Event(), []

    async def step() -> None:
        await may_end.wait()
        did.append("step")
        raise ValueError("out of memory")

    async def save() -> None:
        did.append("save")

    caller = asyncio.create_task(queue.run("step", step))
    waiting = asyncio.create_task(queue.run("save", save))
    following = asyncio.create_task(queue.run("save", save))
    await asyncio.sleep(0.01)
    with caplog.at_level("WARNING", "ray.serve"):
        for call in (caller, waiting):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert queue.doing == "step", "the status shows that it still runs"
        may_end.set()
        await following
    assert did == ["step", "save"], "the call that had not begun is dropped"
    # An earlier test's trainer may still log.
    assert [each.getMessage() for each in caplog.records if each.module == "trainer"] == [
        "the caller of 'step' disconnected; the trainer continues with it",
        "a call whose caller disconnected has failed: out of memory",
    ]


# -- the steps that were done ----------------------------------------------------------------------


def test_each_step_is_told_once_though_the_clock_is_set_back_and_rollouts_only_of_the_last() -> None:
    times = iter([10.0, 9.0, 12.0])
    history = StepHistory(steps=10, with_rollouts=2, clock=lambda: next(times))
    sample = RolloutSample(text="4", reward=1.0, versions=[(3, 5)])
    for step in (1, 2, 3):
        history.add(StepEntry(run="grpo-1", step=step, values={}, rollouts=[sample]))
    told = history.after(0.0)
    assert [(each.step, each.at, len(each.rollouts)) for each in told] == [
        (1, 10.0, 0),
        (2, 10.001, 1),
        (3, 12.0, 1),
    ]
    assert [each.step for each in history.after(told[1].at)] == [3]


def test_figures_of_steps_are_those_of_the_trainer_or_of_its_job() -> None:
    recorded = Recorded()
    count_step(StepEntry(run="", step=3, values={"loss": 0.5, "lost": None, "bad": math.nan}), recorded)
    count_step(StepEntry(run="grpo-1", step=3, values={"reward": 0.25, "größe": 1.0}), recorded)
    assert recorded.values(STEPS) == {None: [1.0]}
    assert recorded.values(STEP, "figure") == {"loss": [0.5], "reward": [0.25], r"gr\xf6\xdfe": [1.0]}
    assert recorded.values(STEP, "source") == {"trainer": [0.5], "job": [0.25, 1.0]}


# -- the session of a dead worker ------------------------------------------------------------------


def publishing(controller: ControllerInProcess) -> tuple[int, int]:
    """A worker opened a round and died: its token, and the round."""
    token = controller.ask("acquire", PUBLISHER).token
    controller.ask("connect", token, {})
    return token, controller.ask("open_round", token, RoundOptions())


async def test_a_dead_workers_round_and_lease_end_at_once(controller: ControllerInProcess) -> None:
    token, round_id = publishing(controller)
    with pytest.raises(Conflict):
        controller.ask("acquire", "http")
    await end_former_session(controller)  # type: ignore[arg-type]
    with pytest.raises(StalePublisher):
        controller.ask("send", token, round_id, {})
    assert controller.status.round is None and controller.ask("acquire", "http").publisher == "http"


@pytest.mark.parametrize("holder", ["http", None])
async def test_another_publishers_lease_is_left_alone(
    controller: ControllerInProcess, holder: str | None
) -> None:
    held = None if holder is None else controller.ask("acquire", holder)
    await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet"] and (held is None or controller.ask("renew", held.token) == held)


async def test_a_closed_round_is_left_alone(controller: ControllerInProcess) -> None:
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


async def test_a_controller_that_refuses_does_not_keep_the_trainer_from_starting(
    controller: ControllerInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    publishing(controller)
    controller.fails["acquire"] = Conflict("not now")
    with caplog.at_level("WARNING", "ray.serve"):
        await end_former_session(controller)  # type: ignore[arg-type]
    assert controller.calls == ["fleet", "acquire"]
    assert "failed to end the session of a former trainer: not now" in caplog.text


async def test_replicas_close_the_memory_that_they_share_with_the_trainer(
    controller: ControllerInProcess,
) -> None:
    publishing(controller)
    await end_former_session(controller, shares_memory=True)  # type: ignore[arg-type]
    assert controller.calls == ["acquire", "disconnect", "release"] and controller.status.connected is None


# -- version 0 -------------------------------------------------------------------------------------


def test_what_began_with_other_weights_than_the_fleet_is_not_published() -> None:
    one, other = InitialWeights(digest="1" * 32), InitialWeights(digest="2" * 32)
    loaded = LoadedTrainer(version=0, step=1, parameters=1, initial=one)
    check_version_0(replace(SERVED, initial=other), loaded)  # an adapter's base is a later version
    check_version_0(replace(SERVED, committed_version=0, initial=one), loaded)
    for trained in (replace(loaded, initial=other), replace(loaded, initial=None)):
        with pytest.raises(Conflict, match=f"version 0 of this fleet is {one}, and its trainer began with"):
            check_version_0(replace(SERVED, committed_version=0, initial=one), trained)


# -- lost versions ---------------------------------------------------------------------------------

ROUND = RoundStatus(round_id=5, version=5, label=None, phase="open", age_s=1.0, participants=("r0",))


def fleet(
    *members: tuple[str, int],
    committed: int = 4,
    stored: int | None = 3,
    current_round: RoundStatus | None = None,
) -> FleetStatus:
    made = status(committed, [f"r{index}" for index in range(len(members))])
    each = [
        replace(member, state=state, admitted=state == "serving", version=version)
        for member, (state, version) in zip(made.members, members, strict=True)
    ]
    return replace(made, stored_version=stored, round=current_round, members=each)


LOST = fleet(("joining", 3), ("joining", 3))
SERVED = fleet(("serving", 4))
STARVED = replace(fleet(("joining", 3), ("serving", 4)), store_problem="version 4 is not in the store")


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
def test_a_version_is_lost_when_joiners_wait_and_neither_replica_nor_store_has_it(
    status: FleetStatus, lost: bool
) -> None:
    assert is_lost(status) is lost


@pytest.mark.parametrize(
    ("status", "published", "starved"),
    [
        (STARVED, 4, True),
        (STARVED, 3, False),  # another publisher's: the trainer's weights would replace it
        (replace(STARVED, store_problem=None), 4, False),  # it may still be stored
        (replace(STARVED, round=ROUND), 4, False),
        (replace(SERVED, store_problem="version 4 is not in the store"), 4, False),  # no replica waits
    ],
)
def test_joiners_starve_when_only_replicas_hold_what_the_trainer_published(
    status: FleetStatus, published: int, starved: bool
) -> None:
    assert is_starved(status, published) is starved and not is_lost(status)


async def labels_published(
    statuses: Sequence[FleetStatus | Exception], publish_fails: int = 0, own: int = 4
) -> list[str]:
    """What `watch` publishes over version 4 while the controller gives these answers, one per check."""
    answers: Iterator[FleetStatus | Exception] = iter(statuses)
    published: list[str] = []
    settled: list[int] = []
    exhausted = asyncio.Event()

    async def asked() -> FleetStatus:
        answer = next(answers, None)
        if answer is None:
            exhausted.set()
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    async def publish(label: str, after: int) -> None:
        assert after == 4
        published.append(label)
        if len(published) <= publish_fails:
            raise FleetUnavailable("no replica is registered")

    async def settle() -> None:
        settled.append(len(settled))

    watching = asyncio.create_task(watch(asked, publish, lambda: own, settle, period_s=0.0))
    await exhausted.wait()
    watching.cancel()
    assert len(settled) == len(statuses) + 1, "each check asks for the answer that was lost"
    return published


@pytest.mark.parametrize(
    ("checks", "publish_fails", "labels"),
    [
        ([LOST] * CONFIRMATIONS, 0, ["version 4 was lost"]),
        ([LOST] * (CONFIRMATIONS - 1), 0, []),
        ([STARVED] * CONFIRMATIONS, 0, ["version 4 was not stored"]),
        ([STARVED] * (CONFIRMATIONS - 1), 0, []),
        ([LOST, LOST, SERVED, LOST, LOST], 0, []),  # the store was written in time
        ([LOST, LOST, FleetUnavailable("restarting"), LOST], 0, ["version 4 was lost"]),
        ([LOST] * 6, 1, ["version 4 was lost"] * 2),
    ],
)
async def test_a_version_missing_in_several_checks_is_published_again(
    checks: list[FleetStatus | Exception], publish_fails: int, labels: list[str]
) -> None:
    assert await labels_published(checks, publish_fails) == labels


async def test_what_an_older_trainer_publishes_in_place_of_a_lost_version_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "ray.serve"):
        assert await labels_published([LOST] * CONFIRMATIONS, own=3) == ["version 4 was lost"]
    assert "version 4 was lost, and replicas wait for it: publishing version 3 in its place" in caplog.text
