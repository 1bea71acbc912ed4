"""vLLM's own trainer engines send, our staging receives: every wire that they speak, and what goes wrong."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.protocol.poll import Outcome
from tests.deployments.weights.transports.transport_contract import digest_of
from tests.deployments.weights.transports.transport_fleet import ListSource, Rejected, write_checkpoint
from tests.deployments.weights.transports.vllm_trainer import (
    TIMEOUT_S,
    GlooWireGroup,
    HttpFleet,
    SharedMemory,
    VllmReceiver,
    vllm_without_a_gpu,
)
from tests.deployments.weights.transports.vllm_wires import (
    connect,
    every_ipc,
    every_nccl,
    every_wire,
    version,
    within,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, version(0))
    return directory


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with vllm_without_a_gpu() as shared:
        yield shared


@pytest.fixture
def fleet(wire: str, checkpoint: Path, memory: SharedMemory) -> Iterator[HttpFleet]:
    made = HttpFleet([VllmReceiver(wire.split()[0], str(checkpoint)) for _ in range(2)])
    yield made
    for receiver in made.receivers:
        receiver.stop()


@pytest.mark.slow
@every_wire
def test_vllms_payload_is_staged_and_reports_its_checks(wire: str, fleet: HttpFleet) -> None:
    tensors = version(1)
    engine = connect(wire, fleet, ListSource(tensors))
    engine.send_weights()
    for state in fleet.verify():
        assert (state.outcome, state.message) == (Outcome.DONE, "")
        assert state.digest == digest_of(tensors)
        assert [check.value for check in state.checks] == ["names", "shapes", "dtypes", "complete", "finite"]
        assert state.size_bytes >= sum(tensor.numel() * tensor.itemsize for _, tensor in tensors)
    assert [receiver.staged() for receiver in fleet.receivers] == [digest_of(tensors)] * 2
    assert fleet.payloads == (8 if wire == "ipc packed" else 1)


@pytest.mark.slow
@every_wire
@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (3, ("strange", torch.zeros(2)), "'strange' is not a tensor of this model"),
        (1, ("norm.weight", torch.full((7,), torch.nan)), "'norm.weight' holds NaN or infinity"),
    ],
    ids=["name", "nan"],
)
def test_tensor_that_does_not_fit_is_refused_and_the_trainer_is_free(
    wire: str, fleet: HttpFleet, index: int, tensor: tuple[str, torch.Tensor], message: str
) -> None:
    tensors = version(1)
    tensors[index] = tensor
    engine = connect(wire, fleet, ListSource(tensors))
    with pytest.raises(Rejected, match=f"^{re.escape(message)}$"):
        within(2 * TIMEOUT_S, engine.send_weights)


@every_wire
def test_a_payload_before_the_handshake_is_refused(wire: str, fleet: HttpFleet) -> None:
    fleet.start_weight_update()
    with pytest.raises(Rejected, match=r"^no .*: call init_weight_transfer_engine before update_weights$"):
        handles = {"ipc_handles": []} if wire.startswith("ipc") else {}
        super(HttpFleet, fleet).update_weights({"names": [], "dtype_names": [], "shapes": []} | handles)


# -- CUDA IPC --------------------------------------------------------------------------------------


@pytest.mark.slow
@every_ipc
@pytest.mark.parametrize("end", ["staged", "refused", "incomplete and dropped"])
def test_trainers_memory_is_released_after_a_round(
    wire: str, end: str, fleet: HttpFleet, memory: SharedMemory
) -> None:
    tensors = version(1)
    if end == "refused":
        tensors[-1] = ("strange", torch.zeros(2))
    engine = connect(wire, fleet, ListSource(tensors[:-1] if end.startswith("incomplete") else tensors))
    if end == "refused":
        with pytest.raises(Rejected):
            engine.send_weights()
    else:
        engine.send_weights()
    if end != "staged":
        fleet.drop()
    assert memory.users() == 0


def test_pieces_are_copied_before_the_call_returns(checkpoint: Path, memory: SharedMemory) -> None:
    fleet = HttpFleet([VllmReceiver("ipc", str(checkpoint))])
    tensors = version(1)
    connect("ipc packed", fleet, ListSource(tensors)).send_weights()
    for exported in memory._exported.values():
        exported.fill_(0xFF)
    assert fleet.receivers[0].staged() == digest_of(tensors)


@pytest.mark.parametrize(
    ("wire", "change", "message"),
    [
        ("ipc packed", {"tensor_sizes": [1]}, r"tensor_sizes: expected \[24\], got \[1\]"),
        ("ipc packed", {"ipc_handles": [{}]}, "ipc_handles do not fit a connection that is packed"),
        ("ipc", {"ipc_handles": {}}, "ipc_handles do not fit a connection that is not packed"),
        ("ipc", {"ipc_handles": [{}]}, r"this worker is on GPU GPU-0, and the trainer's handles are of \[\]"),
        ("ipc", {"dtype_names": ["float64"]}, "was announced as torch.float64 .*, and its handle is of"),
        ("ipc", {"shapes": [[3, 2]]}, r"was announced as torch.float32 \[3, 2\], and its handle is of"),
        ("ipc", {"names": ["a", "b"]}, "should be of the same size as `names`|one entry per tensor"),
        ("ipc", {"ipc_handles": [{"GPU-0": {"size": [2]}}]}, "expected encoded CUDA IPC handles"),
    ],
)
def test_handles_that_do_not_fit_are_refused(
    wire: str, change: dict[str, Any], message: str, fleet: HttpFleet, memory: SharedMemory
) -> None:
    fleet.init_weight_transfer_engine({"packed": wire == "ipc packed"})
    fleet.start_weight_update()
    _, parts = memory.export(torch.zeros(24, dtype=torch.uint8) if "packed" in wire else torch.zeros(2, 3))
    from deployments.weights.wire.cuda_ipc_handles import encode_handle

    handle = {"GPU-0": encode_handle(parts)}
    good: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    good |= {"ipc_handles": handle, "tensor_sizes": [24]} if "packed" in wire else {"ipc_handles": [handle]}
    with pytest.raises(Rejected, match=message):
        super(HttpFleet, fleet).update_weights(good | change)


@pytest.mark.parametrize("wire", ["ipc"])
def test_handle_that_the_driver_refuses_is_the_publishers_fault(
    wire: str, fleet: HttpFleet, memory: SharedMemory
) -> None:
    engine = connect(wire, fleet, ListSource(version(1)))
    memory._exported = _Forgetting()
    with pytest.raises(Rejected, match=r"^'embed.weight': the CUDA IPC handle cannot be opened: invalid"):
        engine.send_weights()


class _Forgetting(dict[bytes, torch.Tensor]):
    def __contains__(self, key: object) -> bool:
        return False


# -- NCCL ------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_nccl
def test_tensors_that_are_not_described_again_are_those_of_the_last_round(
    wire: str, fleet: HttpFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33's trainer engine describes them once, and 0.32's in each round."""
    source = ListSource(version(1))
    engine, update = connect(wire, fleet, source), fleet.update_weights
    for number in (1, 2):
        source.tensors = version(number)
        engine.send_weights()
        assert {state.digest for state in fleet.verify()} == {digest_of(source.tensors)}
        monkeypatch.setattr(
            fleet, "update_weights", lambda _: update({"names": [], "dtype_names": [], "shapes": []})
        )


@pytest.mark.slow
@every_nccl
def test_drop_frees_workers_from_a_stalled_trainer(wire: str, fleet: HttpFleet, checkpoint: Path) -> None:
    tensors, resume = version(1), threading.Event()
    engine: Any = connect(wire, fleet, ListSource(tensors))
    engine.model_update_group.before[2] = resume
    with ThreadPoolExecutor(max_workers=1) as calls:
        sending = calls.submit(engine.send_weights)
        assert fleet.started.wait(TIMEOUT_S)
        time.sleep(0.3)
        assert max(receiver.drop() for receiver in fleet.receivers) < TIMEOUT_S
        for receiver in fleet.receivers:
            receiver.start()
            receiver.update({"names": [], "dtype_names": [], "shapes": []})
            receiver.engine._thread.submit(lambda: None).result(TIMEOUT_S)
            assert receiver.progress().message.startswith("no transfer group: call init_weight_transfer")
            receiver.drop()
        # A new trainer, and who joined meanwhile.
        fleet.receivers.append(VllmReceiver("nccl", str(checkpoint)))
        connect(wire, fleet, ListSource(tensors)).send_weights()
        assert [state.digest for state in fleet.verify()] == [digest_of(tensors)] * 3
        resume.set()
        assert sending.exception(10 * TIMEOUT_S) is not None


@pytest.mark.slow
@every_nccl
def test_wait_for_a_stalled_trainer_ends_at_the_timeout(wire: str, fleet: HttpFleet) -> None:
    resume = threading.Event()
    engine: Any = connect(wire, fleet, ListSource(version(1)))
    engine.model_update_group.before[2] = resume
    with ThreadPoolExecutor(max_workers=1) as calls:
        sending = calls.submit(engine.send_weights)
        assert fleet.started.wait(TIMEOUT_S)
        deadline = time.monotonic() + 4 * TIMEOUT_S
        while not all(each.outcome is Outcome.TRANSFER_FAILED for each in fleet.progress()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        resume.set()
        assert sending.exception(10 * TIMEOUT_S) is not None


@pytest.mark.slow
@every_nccl
def test_malformed_metadata_ends_the_group(wire: str, fleet: HttpFleet) -> None:
    connect(wire, fleet, ListSource(version(1)))
    fleet.start_weight_update()
    with pytest.raises(Rejected, match="expected the name of a torch dtype, got 'bflot16'"):
        fleet.update_weights({"names": ["a"], "dtype_names": ["bflot16"], "shapes": [[2]]})
    for receiver in fleet.receivers:
        receiver.drop()
        assert receiver.engine._group is None


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["nccl packed"])
def test_pieces_too_large_for_memory_are_the_publishers_fault(
    wire: str, fleet: HttpFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: GlooWireGroup, size_bytes: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    connect(wire, fleet, ListSource(version(1)))
    monkeypatch.setattr(GlooWireGroup, "reserve", full)
    fleet.start_weight_update()
    with pytest.raises(Rejected, match="no memory on the device for two buffers of 24 bytes"):
        fleet.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]})


@pytest.mark.parametrize("wire", ["nccl"])
def test_a_unique_id_without_a_store_is_refused(wire: str, fleet: HttpFleet) -> None:
    import base64

    info = {"nccl_unique_id_b64": base64.b64encode(bytes(128)).decode(), "rank_offset": 1, "world_size": 3}
    for receiver in fleet.receivers:
        receiver.connect(info)
        receiver.engine._thread.submit(lambda: None).result(TIMEOUT_S)
        assert "expected master_address and master_port" in receiver.progress().message
