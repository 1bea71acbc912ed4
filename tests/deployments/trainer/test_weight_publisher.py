"""One rank's part of a round, over shared memory to a fake controller, and the source that it sends."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deployments.protocol.errors import FleetUnavailable, TransferAborted
from deployments.protocol.poll import Outcome, Verify
from deployments.protocol.publishing import RoundReport
from deployments.trainer.weight_publisher import PublishSource, WeightPublisher
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import equal
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


def test_a_round_sends_every_tensor_and_states_the_label(controller: ControllerInProcess) -> None:
    model = tiny_llama(0)
    publisher = publisher_of(controller, ParameterSource(model))
    report = published(publisher, "step-1")
    assert (report.version, report.label) == (1, "step-1")
    assert equal(controller.received, dict(ParameterSource(model)))
    assert published(publisher).label is None, "a label is that of one round"
    publisher.close()


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
    for _ in range(2):
        published(publisher)
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


def test_a_round_that_the_fleet_aborts_raises_its_error_and_leaves_no_lease(
    controller: ControllerInProcess,
) -> None:
    controller.replica.outcomes[Verify] = Outcome.TRANSFER_FAILED
    publisher = publisher_of(controller)
    with pytest.raises(TransferAborted, match="transfer_failed here"):
        publisher.publish(None)
    controller.replica.outcomes.clear()
    assert controller.status.lease is None
    assert published(publisher).version == 1
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
