"""The contract of the transports that wait for somebody: nobody waits for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deployments.weights.transports.transport_contract import (
    PATIENCE_S,
    connect,
    device_of,
    every_waiting_transport,
    init_info,
    kill,
    make_fleet,
    publish,
    stop,
    weights,
)
from tests.deployments.weights.transports.transport_fleet import Fleet, ListSource, Rejected


@every_waiting_transport
def test_weights_before_the_handshake_are_rejected(transport: str, fleet: Fleet) -> None:
    fleet.start_weight_update()
    with pytest.raises(Rejected, match="call init_weight_transfer_engine before update_weights"):
        fleet.update_weights({"round_id": 1} if transport == "slipstream_ipc" else {})


@every_waiting_transport
def test_a_publisher_that_stops_is_broken_off_and_the_next_round_works(transport: str, fleet: Fleet) -> None:
    def die(index: int) -> None:
        if index == 3:
            raise OSError("out of disk")

    with pytest.raises(OSError, match="out of disk"):
        publish(transport, fleet, ListSource(weights(1, device_of(transport)), before=die))
    start = time.monotonic()
    fleet.drop()
    assert time.monotonic() - start < PATIENCE_S
    publish(transport, fleet, ListSource(weights(2, device_of(transport))))
    assert {state["outcome"] for state in fleet.verify()} == {"done"}


@every_waiting_transport
def test_a_receiver_waits_for_a_silent_publisher_no_longer_than_the_deadline(
    transport: str, fleet: Fleet
) -> None:
    go_on = threading.Event()
    source = ListSource(
        weights(1, device_of(transport)), before=lambda i: i == 3 and go_on.wait(PATIENCE_S) and None
    )
    engine = connect(transport, fleet, source)
    failures: list[BaseException] = []

    def send() -> None:
        try:
            engine.send_weights()
        except Exception as error:  # handed to the test's thread
            failures.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    deadline = time.monotonic() + PATIENCE_S
    states = []
    while time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            states = [receiver.progress() for receiver in fleet.receivers]
        except Exception:  # the session has not begun
            continue
        if all(state["outcome"] == "broken" for state in states):
            break
    go_on.set()
    sending.join(PATIENCE_S)
    engine.shutdown()
    assert [state["outcome"] for state in states] == ["broken"] * len(states), states
    assert failures


@every_waiting_transport
def test_a_dead_receiver_ends_the_round_within_the_deadline_and_the_rest_goes_on(
    transport: str, checkpoint: Path
) -> None:
    fleet = make_fleet(transport, checkpoint)
    if len(fleet.receivers) < 2:
        pytest.skip("needs two receivers")
    source = ListSource(weights(1, device_of(transport)))
    engine = connect(transport, fleet, source)
    kill(fleet.receivers.pop())
    start = time.monotonic()
    with pytest.raises(Exception, match=r"broke|nothing came|aborted|given"):
        engine.send_weights()
    assert time.monotonic() - start < PATIENCE_S
    engine.shutdown()
    fleet.drop()
    publish(transport, fleet, ListSource(weights(2, device_of(transport))))
    assert {state["outcome"] for state in fleet.verify()} == {"done"}
    for receiver in fleet.receivers:
        stop(receiver)


@every_waiting_transport
def test_a_member_that_does_not_come_is_named_by_a_deadline(transport: str, fleet: Fleet) -> None:
    if transport == "slipstream_ipc":
        pytest.skip("nobody waits for the others: each worker opens its own GPU's channel")
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    info = init_info(transport, fleet, world_size=2 + len(fleet.receivers))
    with pytest.raises(Exception, match=r"(?i)time|broke|expected"):
        WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=fleet, source=ListSource(weights(1, device_of(transport)))
        )


@every_waiting_transport
def test_a_meeting_that_is_given_up_is_left_by_both_sides_at_once(transport: str, fleet: Fleet) -> None:
    if transport == "slipstream_ipc":
        pytest.skip("nobody waits for the others: each worker opens its own GPU's channel")
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    info = replace(init_info(transport, fleet, world_size=2 + len(fleet.receivers)), timeout_s=90.0)
    source = ListSource(weights(1, device_of(transport)))
    with ThreadPoolExecutor(max_workers=1) as calls:
        meeting = calls.submit(
            WeightTransferTrainerFactory.trainer_init, init_info=info, client=fleet, source=source
        )
        time.sleep(1.0)
        assert not meeting.done()
        start = time.monotonic()
        fleet.drop()
        with pytest.raises(Rejected, match="given up"):
            meeting.result()
    assert time.monotonic() - start < PATIENCE_S
    publish(transport, fleet, source)
    assert {state["outcome"] for state in fleet.verify()} == {"done"}


@pytest.mark.gpu
def test_ipc_names_the_gpus_when_no_trainer_is_on_the_workers_one(checkpoint: Path) -> None:
    fleet = make_fleet("slipstream_ipc", checkpoint, count=1)
    info = {"channels": {"GPU-elsewhere": {"page": "", "buffers": []}}, "rank_offset": 1, "world_size": 2}
    with pytest.raises(Rejected, match=r"this worker is on GPU .* trainer has ranks on \['GPU-elsewhere'\]"):
        fleet.init_weight_transfer_engine(info)
    stop(fleet.receivers[0])
