"""One contract for every transport, sender and receivers together: the real engines, no vLLM model."""

from pathlib import Path

import pytest
import torch

from deployments.protocol import Outcome
from deployments.weights.staging.progress_page import StatePage
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import combined
from deployments.weights.wire.received_chunk import BrokenGroup
from deployments.weights.wire.shared_memory import remove_segment
from tests.deployments.weights.transports.transport_contract import (
    connect,
    device_of,
    every_transport,
    make_fleet,
    publish,
    stop,
    weights,
)
from tests.deployments.weights.transports.transport_fleet import (
    Fleet,
    ListSource,
    Rejected,
    Resident,
    Tensors,
)


def digest_of(tensors: Tensors) -> str:
    names = [name for name, _ in tensors]
    return combined(names, digests([tensor for _, tensor in tensors]))


@every_transport
def test_every_receiver_stages_what_was_sent(transport: str, fleet: Fleet) -> None:
    tensors = weights(1, device_of(transport))
    publish(transport, fleet, ListSource(tensors))
    expected = digest_of(tensors)
    states = fleet.verify()
    assert [state["outcome"] for state in states] == ["done"] * len(states), states
    assert [state["digest"] for state in states] == [expected] * len(states)
    assert [receiver.staged() for receiver in fleet.receivers] == [expected] * len(states)


@every_transport
def test_a_connection_carries_several_rounds(transport: str, fleet: Fleet) -> None:
    source = ListSource(weights(1, device_of(transport)))
    engine = connect(transport, fleet, source)
    found = set()
    for seed in (2, 3, 4):
        source.tensors = weights(seed, device_of(transport))
        engine.send_weights()
        found |= {state["digest"] for state in fleet.verify()}
        fleet.drop() if transport in ("shm", "slipstream_ipc") else None
    engine.shutdown()
    assert len(found) == 3


@every_transport
def test_tensors_that_stay_in_place_are_sent_as_they_are_in_each_round(transport: str, fleet: Fleet) -> None:
    source = Resident(weights(1, device_of(transport)))
    engine = connect(transport, fleet, source)
    for seed in (2, 3, 4):
        for (_, tensor), (_, new) in zip(source.tensors, weights(seed), strict=True):
            tensor.copy_(new)
        engine.send_weights()
        assert {state["digest"] for state in fleet.verify()} == {digest_of(source.tensors)}
        fleet.drop() if transport in ("shm", "slipstream_ipc") else None
    engine.shutdown()


@every_transport
def test_tensors_that_stay_in_place_are_cast_to_what_is_declared(transport: str, fleet: Fleet) -> None:
    declared = weights(1, device_of(transport))
    source = Resident([(n, t.double() if t.is_floating_point() else t) for n, t in declared], declared)
    engine = connect(transport, fleet, source)
    for seed in (2, 3, 4):
        wanted = weights(seed, device_of(transport))
        for (_, tensor), (_, new) in zip(source.tensors, wanted, strict=True):
            tensor.copy_(new)
        engine.send_weights()
        assert {state["digest"] for state in fleet.verify()} == {digest_of(wanted)}
        fleet.drop() if transport in ("shm", "slipstream_ipc") else None
    engine.shutdown()


@every_transport
def test_tensors_that_have_moved_are_sent_from_where_they_are(transport: str, fleet: Fleet) -> None:
    source = Resident(weights(1, device_of(transport)))
    engine = connect(transport, fleet, source)
    engine.send_weights()
    fleet.drop() if transport in ("shm", "slipstream_ipc") else None
    source.move()
    for _, tensor in source.tensors:
        tensor.zero_()
    if not engine.fits():
        with pytest.raises(BrokenGroup, match="connect again"):
            engine.send_weights()
        engine.shutdown()
        engine = connect(transport, fleet, source)
    engine.send_weights()
    assert {state["digest"] for state in fleet.verify()} == {digest_of(source.tensors)}
    engine.shutdown()


def test_each_session_tells_its_own_state_in_the_page(checkpoint: Path) -> None:
    fleet = make_fleet("shm", checkpoint, count=1)
    engine = fleet.receivers[0].engine
    name, page = StatePage.create(1)
    assert engine.report_to(name)
    for _ in range(2):
        publish("shm", fleet, ListSource(weights(1)))
        told = page.read(0)
        assert told == engine.progress() and told["payloads_done"] == fleet.payloads > 0
        fleet.drop()
        engine.start_weight_update()
        assert page.read(0) is None, "who looks there would take the former session's state for this one's"
    with pytest.raises(Rejected, match="is not a tensor of this model"):
        publish("shm", fleet, ListSource([("strange", torch.zeros(2))]))
    told = page.read(0)
    assert told is not None and told["outcome"] == Outcome.REJECTED
    remove_segment(name)
    stop(fleet.receivers[0])


@every_transport
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("strange", torch.zeros(2)), "'strange' is not a tensor of this model"),
        (("norm.weight", torch.zeros(8)), r"'norm.weight' must have shape \[7\], got \[8\]"),
        (("norm.weight", torch.zeros(7, dtype=torch.int64)), "must be of a dtype like float32, got int64"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_what_does_not_fit_the_model_is_rejected(
    transport: str, fleet: Fleet, tensor: tuple[str, torch.Tensor], message: str
) -> None:
    wrong = [(tensor[0], tensor[1].to(device_of(transport)))]
    with pytest.raises(Exception, match=message):
        publish(transport, fleet, ListSource(wrong))


@every_transport
def test_a_number_that_is_not_finite_is_rejected(transport: str, fleet: Fleet) -> None:
    tensors = weights(1, device_of(transport))
    dict(tensors)["layer.weight"][128, 16] = float("nan")
    with pytest.raises(Rejected, match=r"'layer.weight' holds NaN or infinity"):
        publish(transport, fleet, ListSource(tensors))


@every_transport
def test_torn_bytes_are_found(transport: str, checkpoint: Path) -> None:
    fleet = make_fleet(transport, checkpoint, tear=True)
    try:
        with pytest.raises(Rejected, match="was sent with digest"):
            publish(transport, fleet, ListSource(weights(1, device_of(transport))))
    finally:
        for receiver in fleet.receivers:
            stop(receiver)


@every_transport
def test_a_missing_tensor_is_found_at_the_end(transport: str, fleet: Fleet) -> None:
    publish(transport, fleet, ListSource(weights(1, device_of(transport))[:-1]))
    for state in fleet.verify():
        assert (state["outcome"], state["message"]) == ("rejected", "'positions' is missing")


@every_transport
def test_a_source_that_yields_another_order_than_it_declares_is_an_error(
    transport: str, fleet: Fleet
) -> None:
    tensors = weights(1, device_of(transport))
    with pytest.raises(ValueError, match=r"the source declared 'embed.weight' .* and yielded 'positions'"):
        publish(transport, fleet, ListSource(tensors[::-1], declared=tensors))
    fleet.drop()
