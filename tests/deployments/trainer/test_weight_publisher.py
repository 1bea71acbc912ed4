"""One rank's part of a round, over shared memory to a fake controller, and the source that it sends."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.protocol.errors import AnswerLost, Conflict, FleetUnavailable
from deployments.protocol.publishing import RoundReport
from deployments.trainer.spec import LoadedTrainer
from deployments.trainer.trainer_rounds import TrainerRounds
from deployments.trainer.weight_publisher import PublishSource, WeightPublisher
from deployments.trainer.worker import TrainerWorker
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, equal, small_spec, started
from tests.deployments.trainer.trainer_specs import trainer_spec
from tests.tiny_models import tiny_llama
from trainers.sources import ParameterSource

pytestmark = pytest.mark.slow  # optimizer steps

SPEC = trainer_spec(chunk_bytes=1 << 18)


class BreakingSource(ParameterSource):
    """A source that breaks in the middle of an iteration while `broken` is true, once `sent` is."""

    broken = False
    sent: Callable[[], object] = staticmethod(lambda: True)

    def resident(self) -> None:
        """Nothing: every round iterates."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(super().__iter__()):
            if self.broken and index == 3:
                while not self.sent():
                    time.sleep(0.01)
                raise RuntimeError("out of memory")
            yield pair


def publisher_of(controller: ControllerInProcess, source: ParameterSource | None = None) -> WeightPublisher:
    return WeightPublisher(SPEC, 0, ParameterSource(tiny_llama(0)) if source is None else source, controller)


def published(publisher: WeightPublisher, label: str | None = None) -> RoundReport:
    report = publisher.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


# -- the source ------------------------------------------------------------------------------------


def test_a_round_that_sent_the_models_own_memory_is_copied_without_an_iteration_of_its_sender() -> None:
    model = tiny_llama(0)
    source = PublishSource(ParameterSource(model), keep_copy=True)
    source.begin()
    assert source.resident() is not None
    assert equal(source.take_copy(), dict(ParameterSource(model)))


def test_each_round_has_a_copy_of_its_own() -> None:
    model = tiny_llama(0)
    source = PublishSource(ParameterSource(model), keep_copy=True)
    for added in (0.0, 1.0):
        with torch.no_grad():
            model.model.embed_tokens.weight.add_(added)
        source.begin()
        next(iter(source))
        source.begin()  # the round before broke after its first tensor
        sent = {name: tensor.clone() for name, tensor in source}
        assert equal(source.take_copy(), sent)


def test_draining_completes_the_iteration_that_was_left() -> None:
    source = PublishSource(ParameterSource(tiny_llama(0)), keep_copy=True)
    source.begin()
    iteration = iter(source)
    next(iteration)
    source.drain()
    assert next(iteration, None) is None
    assert source.take_copy().keys() == {spec.name for spec in source.specs()}


# -- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda controller: controller.add_replica(),
        lambda controller: controller.publish_as("an outside trainer"),
        lambda controller: controller.restart(),
    ],
    ids=["new epoch", "other publisher", "restarted controller"],
)
def test_a_connection_is_replaced_only_when_the_fleet_needs_it(
    change: Callable[[ControllerInProcess], None], controller: ControllerInProcess
) -> None:
    publisher = publisher_of(controller)
    for label in ("one", None):
        assert published(publisher, label).label == label, "a label is that of one round"
    assert controller.calls.count("connect") == 1
    change(controller)
    for _ in range(2):
        published(publisher)
    assert controller.calls.count("connect") == 2
    publisher.close()


def test_a_round_that_breaks_while_it_is_sent_is_aborted_with_the_reason(
    controller: ControllerInProcess,
) -> None:
    source = BreakingSource(tiny_llama(0))
    publisher = publisher_of(controller, source)
    # Else the replica, whose segment is gone, may say why the round failed before its publisher does.
    source.broken, source.sent = True, lambda: controller.received
    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(None)
    assert controller.ask("rounds")[-1].reason.endswith(": out of memory")
    assert controller.status.lease is None and controller.status.round is None
    source.broken = False
    assert published(publisher).version == 1
    assert controller.calls.count("connect") == 2, "a connection that broke is not used again"
    publisher.close()


def test_an_unreachable_controller_is_the_error_and_nothing_was_begun(
    controller: ControllerInProcess,
) -> None:
    controller.fails["fleet"] = FleetUnavailable("the controller is being restarted")
    with pytest.raises(FleetUnavailable, match="the controller is being restarted"):
        publisher_of(controller).publish(None)
    assert controller.calls == ["fleet"]


def test_a_fleet_without_a_replica_is_not_connected_to(tmp_path: Path) -> None:
    controller = ControllerInProcess(tmp_path, replicas=0)
    with pytest.raises(FleetUnavailable, match="no replica is registered"):
        publisher_of(controller).publish(None)
    assert controller.calls == ["fleet"], "a communicator of the trainer alone works over no transport"
    controller.close()


# -- rounds whose end the trainer did not learn -----------------------------------------------------


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
