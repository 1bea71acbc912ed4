"""Rounds whose end the trainer did not learn, with the real controller and a rank in this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.errors import AnswerLost, Conflict, FleetUnavailable
from deployments.trainer.spec import LoadedTrainer
from deployments.trainer.trainer_rounds import TrainerRounds
from deployments.trainer.worker import TrainerWorker
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, small_spec, started

pytestmark = pytest.mark.slow  # optimizer steps


class OneRank:
    """A worker group of one rank in this process."""

    broken: str | None = None

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker = worker

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await asyncio.to_thread(getattr(self.worker, method), *args)


class Scene:
    def __init__(self, directory: Path, controller: ControllerInProcess) -> None:
        spec = small_spec(directory)
        self.directory = directory
        self.controller = controller
        self.worker = started(spec, controller)
        fleet_id = controller.status.fleet_id
        loaded = LoadedTrainer(version=0, step=0, parameters=0, fleet_id=fleet_id)
        self.rounds = TrainerRounds(OneRank(self.worker), controller, spec, loaded)  # type: ignore[arg-type]

    async def unanswered(self, label: str | None = None) -> None:
        """A publish after a step, and nothing answers once the round is sent."""
        self.worker.step(BATCH)
        await self.rounds.publish("before")
        self.worker.step(BATCH)
        self.controller.loses = {"close_round"}
        with pytest.raises(AnswerLost, match="round 2 may be committed"):
            await self.rounds.publish(label)
        assert self.rounds.version == 1 and self.rounds.unanswered

    def stored(self, version: int) -> Any:
        assert self.worker.flush_version(10.0)
        return self.worker._store.manifest_of(version)


@pytest.fixture
def scene(tmp_path: Path, controller: ControllerInProcess) -> Scene:
    return Scene(tmp_path, controller)


async def test_a_committed_round_whose_answer_was_lost_is_adopted_before_the_next_one(scene: Scene) -> None:
    await scene.unanswered()
    scene.controller.loses = {"rounds"}
    with pytest.raises(FleetUnavailable):
        await scene.rounds.settle()
    scene.controller.loses.clear()
    report = await scene.rounds.publish("next")
    assert (report.version, report.label) == (3, "next")
    stored = scene.stored(2)
    assert (stored.digest, stored.trainer_step) == (scene.controller.ask("rounds")[1].digest, 2)


@pytest.mark.parametrize("by_itself", [False, True])
async def test_a_publish_that_is_made_again_returns_the_round_that_was_committed(
    scene: Scene, by_itself: bool
) -> None:
    await scene.unanswered("mine")
    scene.controller.loses.clear()
    if by_itself:  # as the trainer asks every few seconds
        await scene.rounds.settle()
    report = await scene.rounds.publish("mine")
    assert (report.round_id, report.version) == (2, 2) and scene.rounds.last == report
    assert len(scene.controller.ask("rounds")) == 2


async def test_a_restarted_trainer_publishes_no_step_of_its_predecessor_again(scene: Scene) -> None:
    scene.worker.step(BATCH, label="a/1")
    former = await scene.rounds.publish("a/1")
    scene.stored(1)
    worker = TrainerWorker(small_spec(scene.directory), 0, scene.controller)  # type: ignore[arg-type]
    loaded = worker.load(("127.0.0.1", 0))
    rounds = TrainerRounds(OneRank(worker), scene.controller, worker._spec, loaded)  # type: ignore[arg-type]
    await rounds.recall(loaded.labels)
    again = await rounds.publish("a/1")
    assert (again.version, again.round_id) == (1, former.round_id)
    assert (await rounds.publish("a/1")).version == 2, "once: this is another call"


async def test_a_round_that_was_aborted_meanwhile_is_reported_and_published_anew(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.controller.fails["close_round"] = FleetUnavailable("close_round: no answer within 120 s")
    with pytest.raises(AnswerLost):
        await scene.rounds.publish("mine")
    with caplog.at_level("WARNING", "ray.serve"):
        report = await scene.rounds.publish("mine")
    assert (report.round_id, report.version, report.phase) == (2, 1, "committed")
    assert any("not answered: round 1 was aborted" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("by_itself", [False, True])
async def test_a_controller_that_forgot_the_round_says_that_its_outcome_is_not_known(
    tmp_path: Path, scene: Scene, by_itself: bool
) -> None:
    await scene.unanswered()
    other = ControllerInProcess(tmp_path / "other")
    try:
        scene.rounds._controller = other  # type: ignore[assignment]
        if by_itself:
            await scene.rounds.settle()
        with pytest.raises(Conflict, match=r"round 2 of fleet .* is not known.*is at version 0$"):
            await scene.rounds.publish("next")
    finally:
        other.close()
    assert not scene.rounds.unanswered and scene.rounds.version == 1
