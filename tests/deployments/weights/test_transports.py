"""One contract for every transport, sender and receivers together: the real engines, no vLLM model."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from deployments.weights.digest import combined, digests
from tests.deployments.weights.transport_fleet import (
    Fleet,
    ListSource,
    ProcessReceiver,
    Receiver,
    Rejected,
    Tensors,
    write_checkpoint,
)

CHUNK_BYTES = 4096
TIMEOUT_S = 4.0
PATIENCE_S = 3 * TIMEOUT_S

ON_A_CPU = ["shm", "gloo"]
ON_GPUS = [
    pytest.param("slipstream_ipc", marks=pytest.mark.gpu),
    pytest.param("slipstream_nccl", marks=pytest.mark.gpu),
]
WITH_A_PEER = ["gloo", *ON_GPUS]  # these wait for somebody, and must not wait for ever

every_transport = pytest.mark.parametrize("transport", [*ON_A_CPU, *ON_GPUS])
every_waiting_transport = pytest.mark.parametrize("transport", WITH_A_PEER)

Publish = Callable[[ListSource], None]


def weights(seed: int, device: str = "cpu") -> Tensors:
    """Odd sizes, several dtypes, one tensor larger than a chunk, one empty."""
    torch.manual_seed(seed)
    tensors = [
        ("embed.weight", torch.randn(33, 65).bfloat16()),
        ("norm.weight", torch.randn(7)),
        ("layer.weight", torch.randn(129, 17).half()),
        ("bias", torch.randn(3).bfloat16()),
        ("empty", torch.zeros(0, 4)),
        ("positions", torch.arange(11)),
    ]
    return [(name, tensor.to(device)) for name, tensor in tensors]


def on_gpu(transport: str) -> bool:
    return transport.startswith("slipstream")


def device_of(transport: str) -> str:
    return "cuda:0" if on_gpu(transport) else "cpu"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, weights(0))
    return directory


@pytest.fixture
def fleet(transport: str, checkpoint: Path) -> Iterator[Fleet]:
    made = make_fleet(transport, checkpoint)
    yield made
    for receiver in made.receivers:
        stop(receiver)


def make_fleet(transport: str, checkpoint: Path, count: int = 2, tear: bool = False) -> Fleet:
    if not on_gpu(transport):
        return Fleet([Receiver(transport, str(checkpoint), "cpu", tear) for _ in range(count)])
    gpus = torch.cuda.device_count()
    if transport == "slipstream_nccl":
        if gpus < 2:
            pytest.skip(f"NCCL takes one GPU a rank, and there is {gpus}")
        places = [f"cuda:{1 + index}" for index in range(min(count, gpus - 1))]
    else:
        places = ["cuda:0"] * count
    keys = [(transport, str(checkpoint), place, tear, index) for index, place in enumerate(places)]
    for key in keys:
        if key not in PROCESSES:
            PROCESSES[key] = ProcessReceiver(*key[:4])
    for key in keys:
        PROCESSES[key].connected()  # it has imported vLLM: no deadline of a test runs before that
    return Fleet([PROCESSES[key] for key in keys])


# A process takes ten seconds to import vLLM: the tests share them.
PROCESSES: dict[tuple[Any, ...], ProcessReceiver] = {}


def stop(receiver: Any) -> None:
    receiver.reset() if isinstance(receiver, ProcessReceiver) else receiver.stop()


def kill(receiver: Any) -> None:
    if isinstance(receiver, ProcessReceiver):
        receiver.kill()
        for key in [key for key, value in PROCESSES.items() if value is receiver]:
            del PROCESSES[key]
    else:
        receiver.stop()


def init_info(transport: str, fleet: Fleet, world_size: int | None = None) -> TrainerInitInfo:
    size = 1 + len(fleet.receivers) if world_size is None else world_size
    common: dict[str, Any] = {"rank": 0, "chunk_bytes": CHUNK_BYTES}
    if transport != "shm":
        common |= {"world_size": size, "timeout_s": TIMEOUT_S}
    if transport in ("gloo", "slipstream_nccl"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            common |= {"master_address": "127.0.0.1", "master_port": probe.getsockname()[1]}
    match transport:
        case "shm":
            from deployments.weights.shm import ShmTrainerInitInfo as Info
        case "gloo":
            from deployments.weights.gloo import GlooTrainerInitInfo as Info
        case "slipstream_ipc":
            from deployments.weights.ipc import IpcTrainerInitInfo as Info
        case _:
            from deployments.weights.nccl import NcclTrainerInitInfo as Info
    return Info(**common)


def connect(transport: str, fleet: Fleet, source: ListSource) -> TrainerWeightTransferEngine[Any]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from deployments.weights.plugin import register

    register()
    return WeightTransferTrainerFactory.trainer_init(
        init_info=init_info(transport, fleet), client=fleet, source=source
    )


def publish(transport: str, fleet: Fleet, source: ListSource) -> None:
    engine = connect(transport, fleet, source)
    try:
        engine.send_weights()
    finally:
        engine.shutdown()


@every_transport
def test_every_receiver_stages_what_was_sent(transport: str, fleet: Fleet) -> None:
    tensors = weights(1, device_of(transport))
    publish(transport, fleet, ListSource(tensors))
    names = [name for name, _ in tensors]
    expected = combined(dict(zip(names, digests([t for _, t in tensors]), strict=True)))
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


@every_waiting_transport
def test_weights_before_the_handshake_are_rejected(transport: str, fleet: Fleet) -> None:
    fleet.start_weight_update()
    info = {"names": ["bias"], "dtype_names": ["bfloat16"], "shapes": [[3]]}
    with pytest.raises(Rejected, match="call init_weight_transfer_engine before update_weights"):
        fleet.update_weights(info | ({"round_id": 1} if transport == "slipstream_ipc" else {}))


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
        if all(state["outcome"] == "rejected" for state in states):
            break
    go_on.set()
    sending.join(PATIENCE_S)
    engine.shutdown()
    assert [state["outcome"] for state in states] == ["rejected"] * len(states), states
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
    try:
        engine.send_weights()
    except Exception as error:
        assert re.search("broke|nothing came|aborted|given", str(error)), error
    else:
        # NCCL passes on what fits into its own buffers, so a small model may reach the survivors whole.
        assert {state["outcome"] for state in fleet.verify()} == {"done"}
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


@pytest.mark.gpu
def test_ipc_names_the_gpus_when_no_trainer_is_on_the_workers_one(checkpoint: Path) -> None:
    fleet = make_fleet("slipstream_ipc", checkpoint, count=1)
    info = {"channels": {"GPU-elsewhere": {"page": "", "buffers": []}}, "rank_offset": 1, "world_size": 2}
    with pytest.raises(Rejected, match=r"this worker is on GPU .* trainer has ranks on \['GPU-elsewhere'\]"):
        fleet.init_weight_transfer_engine(info)
    stop(fleet.receivers[0])


@pytest.mark.gpu
def test_digests_on_the_device_equal_the_hosts() -> None:
    from deployments.weights.digest_cuda import device_digests, inspect

    torch.manual_seed(0)
    sizes = [0, 1, 2, 3, 4, 5, 31, 65535, 65536, 65537, 65538, 1 << 20, (1 << 20) + 3, 3 * (1 << 20) + 65541]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    tensors += [torch.randn(33, 65).bfloat16(), torch.randn(1001, 333), torch.randn(5)[1:].half()]
    found = device_digests([tensor.cuda() for tensor in tensors]).cpu().tolist()
    assert [value % (1 << 64) for value in found] == digests(tensors)
    shifted = torch.randint(0, 256, (70001,), dtype=torch.uint8)
    assert digests([shifted.cuda()[1:]]) == digests([shifted[1:].clone()])
    bad = [torch.randn(40000).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    for index, tensor in enumerate(bad):
        tensor[39999 - index] = float("inf") if index else float("nan")
    fine = [torch.randn(40001).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert inspect([t.cuda() for t in [*bad, *fine]])[1].tolist() == [True] * 3 + [False] * 3
