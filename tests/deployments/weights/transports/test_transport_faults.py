import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Outcome
from tests.deployments.weights.transports.transport_contract import (
    PATIENCE_S,
    connect,
    connect_with,
    device_of,
    every_group_transport,
    every_waiting_transport,
    free_port,
    init_info,
    kill,
    make_fleet,
    publish,
    stop,
    weights,
)
from tests.deployments.weights.transports.transport_fleet import POLL_S, Fleet, ListSource, Rejected


def publish_and_verify(transport: str, fleet: Fleet, seed: int) -> None:
    publish(transport, fleet, ListSource(weights(seed, device_of(transport))))
    assert {state.outcome for state in fleet.verify()} == {Outcome.DONE}


@every_waiting_transport
def test_weights_before_the_handshake_are_rejected(transport: str, fleet: Fleet) -> None:
    fleet.start_weight_update()
    expected = r"^no \w+( \w+)?: call init_weight_transfer_engine before update_weights$"
    with pytest.raises(Rejected, match=expected):
        fleet.update_weights({"round_id": 1} if transport == "ipc" else {})


@every_waiting_transport
def test_after_a_publisher_has_failed_receivers_are_free_for_the_next_round(
    transport: str, fleet: Fleet
) -> None:
    def fail(index: int) -> None:
        if index == 3:
            raise OSError("out of disk")

    with pytest.raises(OSError, match=r"^out of disk$"):
        publish(transport, fleet, ListSource(weights(1, device_of(transport)), before=fail))
    start = time.monotonic()
    fleet.drop()
    assert time.monotonic() - start < PATIENCE_S
    publish_and_verify(transport, fleet, 2)


SILENT_PUBLISHER = {
    "gloo": r"^the transfer group failed: ",
    "nccl": r"^the transfer group failed: no progress in 12 s$",
    "ipc": r"^the publisher of the weights: no progress in 12 s$",
}


@pytest.mark.slow
@every_waiting_transport
def test_a_receiver_waits_for_a_silent_publisher_no_longer_than_the_timeout(
    transport: str, fleet: Fleet
) -> None:
    resume = threading.Event()

    def block(index: int) -> None:
        if index == 3:
            resume.wait(PATIENCE_S)

    engine = connect(transport, fleet, ListSource(weights(1, device_of(transport)), before=block))
    with ThreadPoolExecutor(max_workers=1) as calls:
        sending = calls.submit(engine.send_weights)
        assert fleet.started.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while {state.outcome for state in fleet.progress()} != {Outcome.TRANSFER_FAILED}:
            assert time.monotonic() < deadline, fleet.progress()
            time.sleep(POLL_S)
        resume.set()
        with pytest.raises(Rejected, match=SILENT_PUBLISHER[transport]):
            sending.result(PATIENCE_S)
    engine.shutdown()


# What ends the round when a receiver dies. A group fails for all its members. Over IPC the trainer rank waits
# for each worker, and its wait for the dead one begins before the others' wait for the next chunk.
DEAD_RECEIVER: dict[str, tuple[type[Exception], str]] = {
    "gloo": (Rejected, r"^the transfer group failed: "),
    "nccl": (Rejected, r"^the transfer group failed: "),
    "ipc": (TransferFailed, r"^the workers that read from GPU \S+: no progress in 12 s$"),
}


@pytest.mark.slow
@every_waiting_transport
def test_a_dead_receiver_ends_the_round_within_the_timeout_and_the_others_go_on(
    transport: str, checkpoint: Path
) -> None:
    fleet = make_fleet(transport, checkpoint)
    if len(fleet.receivers) < 2:
        pytest.skip("needs two receivers")
    engine = connect(transport, fleet, ListSource(weights(1, device_of(transport))))
    kill(fleet.receivers.pop())
    error, message = DEAD_RECEIVER[transport]
    start = time.monotonic()
    with pytest.raises(error, match=message):
        engine.send_weights()
    assert time.monotonic() - start < PATIENCE_S
    engine.shutdown()
    fleet.drop()
    publish_and_verify(transport, fleet, 2)
    for receiver in fleet.receivers:
        stop(receiver)


@every_group_transport
def test_an_aborted_rendezvous_ends_at_once_on_both_sides(transport: str, fleet: Fleet) -> None:
    workers, port = len(fleet.receivers), free_port()
    info = init_info(transport, workers + 1, timeout_s=90.0, port=port)
    source = ListSource(weights(1, device_of(transport)))
    with ThreadPoolExecutor(max_workers=1) as calls:
        connecting = calls.submit(connect_with, info, fleet, source)
        wait_until_joined(port, range(workers + 1))
        assert not connecting.done()
        start = time.monotonic()
        fleet.drop()
        with pytest.raises(Rejected, match=r"^the connection was aborted$"):
            connecting.result(PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S
    publish_and_verify(transport, fleet, 2)


def wait_until_joined(port: int, ranks: range) -> None:
    """Until these members have joined the rendezvous."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    store.wait([f"slipstream/member/{rank}" for rank in ranks])
