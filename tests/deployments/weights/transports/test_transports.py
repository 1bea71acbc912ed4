"""One contract for every transport, sender and receivers together: the real engines, no vLLM model."""

from pathlib import Path

import pytest

from deployments.host.shared_memory import DIRECTORY, owner
from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Outcome
from tests.deployments.weights.transports.transport_contract import (
    connect,
    device_of,
    digest_of,
    end_round,
    every_transport,
    make_fleet,
    publish,
    stop,
    weights,
)
from tests.deployments.weights.transports.transport_fleet import Fleet, ListSource, Rejected, Resident


def source_of(kind: str, device: str) -> ListSource:
    """Tensors that are made in each pass, that stay where they are, or that are cast on the way."""
    tensors = weights(1, device)
    if kind == "cast":
        return Resident([(n, t.double() if t.is_floating_point() else t) for n, t in tensors], tensors)
    return Resident(tensors) if kind == "resident" else ListSource(tensors)


@every_transport
@pytest.mark.parametrize("kind", ["pass", "resident", "cast"])
def test_connection_carries_several_rounds(transport: str, fleet: Fleet, kind: str) -> None:
    source = source_of(kind, device_of(transport))
    engine = connect(transport, fleet, source)
    for seed in (2, 3, 4):
        wanted = weights(seed, device_of(transport))
        if kind == "pass":
            source.tensors = wanted
        else:
            for (_, tensor), (_, new) in zip(source.tensors, wanted, strict=True):
                tensor.copy_(new)
        engine.send_weights()
        assert {(state.outcome, state.digest) for state in fleet.verify()} == {
            (Outcome.DONE, digest_of(wanted))
        }
        assert {receiver.staged() for receiver in fleet.receivers} == {digest_of(wanted)}
        end_round(transport, fleet)
    engine.shutdown()


def test_no_segment_name_outlives_its_round(checkpoint: Path) -> None:
    others = own_segments()  # of tests before this one
    fleet = make_fleet("shm", checkpoint, count=2)
    source = ListSource(weights(1))
    engine = connect("shm", fleet, source)
    for seed in (1, 2):
        source.tensors = weights(seed)
        engine.send_weights()
        assert {state.digest for state in fleet.verify()} == {digest_of(source.tensors)}
        held = [receiver.staged() for receiver in fleet.receivers]  # its tensors are in that memory
        assert held == [digest_of(source.tensors)] * 2
        end_round("shm", fleet)
        assert not own_segments() - others
    source.tensors = [(name, tensor[:1]) for name, tensor in weights(4)]
    with pytest.raises(ValueError, match="declared"):
        engine.send_weights()
    assert not own_segments() - others, "a round that failed leaves none"
    fleet.drop()
    source.tensors = weights(5)
    engine.send_weights()
    assert {state.digest for state in fleet.verify()} == {digest_of(source.tensors)}
    end_round("shm", fleet)
    engine.shutdown()
    assert not own_segments() - others
    for receiver in fleet.receivers:
        stop(receiver)


def own_segments() -> set[int]:
    """Segments of this process, by their inode numbers."""
    return {path.stat().st_ino for path in DIRECTORY.glob(owner().name("*")) if path.is_file()}


@every_transport
def test_moved_tensors_are_sent_from_their_new_addresses(transport: str, fleet: Fleet) -> None:
    source = Resident(weights(1, device_of(transport)))
    engine = connect(transport, fleet, source)
    engine.send_weights()
    end_round(transport, fleet)
    source.move()
    for _, tensor in source.tensors:
        tensor.zero_()
    assert engine.is_current() is (transport != "ipc")
    if not engine.is_current():
        with pytest.raises(
            TransferFailed, match=r"^the model's tensors are not where they were opened: connect again$"
        ):
            engine.send_weights()
        engine.shutdown()
        engine = connect(transport, fleet, source)
    engine.send_weights()
    assert {state.digest for state in fleet.verify()} == {digest_of(source.tensors)}
    engine.shutdown()


@every_transport
def test_corrupted_tensor_is_rejected(transport: str, checkpoint: Path) -> None:
    fleet = make_fleet(transport, checkpoint, corrupt=True)
    try:
        with pytest.raises(
            Rejected, match=r"'embed.weight' was sent with digest \w{16} and arrived with \w{16}"
        ):
            publish(transport, fleet, ListSource(weights(1, device_of(transport))))
    finally:
        for receiver in fleet.receivers:
            stop(receiver)


@every_transport
def test_source_must_yield_the_order_that_it_declares(transport: str, fleet: Fleet) -> None:
    tensors = weights(1, device_of(transport))
    expected = r"^the source declared 'embed.weight' \(33, 65\) and yielded 'positions' \(11,\)$"
    with pytest.raises(ValueError, match=expected):
        publish(transport, fleet, ListSource(tensors[::-1], declared=tensors))
    fleet.drop()
