import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Outcome, StoreResult, WriteVersion
from deployments.weights.staging.staged_update import MAX_MESSAGE, StagingState, from_wire, to_wire
from deployments.weights.store.owner import claim
from deployments.weights.wire.chunk_layout import ReceivedChunk
from tests.deployments.weights.staging.memory_worker import (
    TIMEOUT_S,
    MemoryWorker,
    chunks_of,
    progress_of,
    receive,
    verify,
    weights,
    write_checkpoint,
)
from tests.deployments.weights.transports.transport_contract import digest_of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture(params=[False, True], ids=["host", "shadow"])
def worker(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[MemoryWorker]:
    worker = MemoryWorker(checkpoint, shadow=request.param)
    yield worker
    worker.engine.shutdown()


def test_an_update_is_staged_beside_the_live_model_and_swapped_by_the_commit(worker: MemoryWorker) -> None:
    state = receive(worker, weights(2.0))
    assert (state.payloads_done, state.outcome, state.message) == (1, Outcome.DONE, "")
    assert state.digest == digest_of(weights(2.0))
    assert state.size_bytes == sum(chunk.chunk.size_bytes for chunk in chunks_of(weights(2.0)))
    assert verify(worker) == state
    assert not any(tensor.any() for tensor in worker.model.tensors().values())
    worker.finish_weight_update()
    for name, tensor in weights(2.0):
        assert torch.equal(worker.model.tensors()[name], tensor)


def test_a_version_of_several_payloads_is_complete_with_the_last(worker: MemoryWorker) -> None:
    first, second = weights(2.0)
    state = receive(worker, [first], share=0.25)
    assert (state.payloads_done, state.digest, worker.engine.share) == (1, "", 0.25)
    state = receive(worker, [second], begins=False)
    assert (state.payloads_done, state.digest) == (2, digest_of([first, second]))
    assert worker.engine.share == 1.0


def test_a_version_without_one_of_its_tensors_is_rejected(worker: MemoryWorker) -> None:
    receive(worker, weights(2.0)[:1])
    state = verify(worker)
    assert state.outcome is Outcome.REJECTED and state.message.startswith("'b' is missing")


def test_a_payload_of_another_publisher_is_rejected(worker: MemoryWorker) -> None:
    """A publisher that stalled posts its next payload into its successor's round."""
    (name, ours), second = weights(2.0)
    receive(worker, [(name, ours)])
    receive(worker, weights(-1.0)[:1], "stale", begins=False)
    receive(worker, [second], begins=False)
    state = verify(worker)
    message = "'w' came twice in this round; is another publisher sending too?"
    assert (state.outcome, state.message, state.digest) == (Outcome.REJECTED, message, "")
    worker.staging_drop()
    assert receive(worker, weights(3.0)).digest == digest_of(weights(3.0)), "the next round is not affected"


def test_a_dropped_update_leaves_the_live_model_and_cannot_be_committed(worker: MemoryWorker) -> None:
    receive(worker, weights(2.0))
    worker.staging_drop()
    assert not any(tensor.any() for tensor in worker.model.tensors().values())
    with pytest.raises(RuntimeError, match="without a matching start_weight_update"):
        worker.finish_weight_update()


def corrupted() -> Iterator[ReceivedChunk]:
    for received in chunks_of(weights(2.0)):
        received.read()[1].view(torch.uint8)[0] ^= 1
        yield received


def misshapen() -> Iterator[ReceivedChunk]:
    return chunks_of([("w", torch.zeros(4))])


def peer_gone() -> Iterator[ReceivedChunk]:
    yield from chunks_of(weights(2.0)[:1])
    raise TransferFailed("rank 0 is gone")


def device_lost() -> Iterator[ReceivedChunk]:
    yield from chunks_of(weights(2.0)[:1])
    raise RuntimeError("CUDA error")


@pytest.mark.parametrize(
    ("payload", "outcome", "message"),
    [
        (corrupted, Outcome.REJECTED, r"'b' was sent with digest \w{16} and arrived with \w{16}"),
        (misshapen, Outcome.REJECTED, r"'w' must have shape \[2, 3\], got \[4\]"),
        (peer_gone, Outcome.TRANSFER_FAILED, "rank 0 is gone"),
        (device_lost, Outcome.REPLICA_FAILED, "RuntimeError: CUDA error"),
    ],
)
def test_an_error_becomes_the_outcome_and_stops_the_update(
    worker: MemoryWorker, payload: Any, outcome: Outcome, message: str
) -> None:
    worker.engine.payloads["bad"] = payload
    worker.staging_receive({"payload": "bad"}, share=1.0, begins=True, retain_version=None)
    state = progress_of(worker)
    assert (state.payloads_done, state.outcome, state.digest) == (1, outcome, "")
    assert re.fullmatch(message, state.message), state.message
    after = receive(worker, weights(3.0), begins=False)
    assert after == replace(state, payloads_done=2, stage_s=after.stage_s)
    assert verify(worker) == after


def test_each_worker_takes_its_own_payload_of_a_list(checkpoint: Path) -> None:
    worker = MemoryWorker(checkpoint, index=1)
    payloads = [{"payload": "for another"}, worker.offer("own", weights(2.0))]
    worker.staging_receive(payloads, share=1.0, begins=True, retain_version=None)
    assert progress_of(worker).digest == digest_of(weights(2.0))
    worker.engine.shutdown()


def test_the_engine_decodes_while_a_payload_arrives(worker: MemoryWorker) -> None:
    arrives = threading.Event()

    def late() -> Iterator[ReceivedChunk]:
        assert arrives.wait(TIMEOUT_S)
        yield from chunks_of(weights(2.0))

    worker.engine.payloads["late"] = late
    worker.staging_receive({"payload": "late"}, share=1.0, begins=True, retain_version=None)
    assert from_wire(StagingState, worker.staging_progress(0.0)).payloads_done == 0
    arrives.set()
    assert progress_of(worker).digest == digest_of(weights(2.0))


def test_a_connection_is_reported_once_established(worker: MemoryWorker) -> None:
    joined = threading.Event()
    worker.engine.on_connect = lambda: joined.wait(TIMEOUT_S) and None
    worker.init_weight_transfer_engine({})
    assert from_wire(StagingState, worker.staging_progress(0.0)).payloads_done == 0
    joined.set()
    state = progress_of(worker)
    assert (state.payloads_done, state.outcome, state.message) == (1, Outcome.DONE, "")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TransferFailed("2 of 3 members joined"), Outcome.TRANSFER_FAILED),
        (OSError("no such host"), Outcome.REPLICA_FAILED),
    ],
)
def test_a_failed_connection_is_reported_with_its_reason(
    worker: MemoryWorker, error: Exception, outcome: Outcome
) -> None:
    def fail() -> None:
        raise error

    worker.engine.on_connect = fail
    worker.init_weight_transfer_engine({})
    state = progress_of(worker)
    assert (state.payloads_done, state.outcome) == (1, outcome) and state.message.endswith(str(error))


def test_a_long_message_is_cut(worker: MemoryWorker) -> None:
    state = receive(worker, [("\N{SNOWMAN}" * 100_000, torch.zeros(1))])
    assert state.outcome is Outcome.REJECTED and len(state.message) == MAX_MESSAGE


WRITE = WriteVersion(version=5, label="five", fleet_id="fleet", digest=None)


def stored(worker: MemoryWorker) -> StoreResult:
    assert worker.engine.version_writer.wait(TIMEOUT_S)
    return from_wire(StoreResult, worker.staging_store_state())


def test_a_retained_version_is_stored_after_its_commit(worker: MemoryWorker, tmp_path: Path) -> None:
    assert worker.staging_store_state() is None
    receive(worker, weights(2.0), retain_version=5)
    with pytest.raises(ValueError, match="version 5 must be retained to be stored, the retained one is None"):
        worker.staging_store(to_wire(WRITE), str(tmp_path / "store"))
    worker.finish_weight_update()
    claim(tmp_path / "store", "fleet", tmp_path)
    worker.staging_store(to_wire(WRITE), str(tmp_path / "store"))
    path = tmp_path / "store" / "v00000005"
    assert stored(worker) == StoreResult(version=5, label="five", path=str(path), problem="")
    assert {file.name for file in path.iterdir()} == {"config.json", "manifest.json", "model.safetensors"}
    loaded = load_file(path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(2.0))


def test_a_forgotten_version_cannot_be_stored(worker: MemoryWorker, tmp_path: Path) -> None:
    receive(worker, weights(2.0), retain_version=5)
    worker.finish_weight_update()
    worker.staging_forget(5)
    with pytest.raises(ValueError, match="the retained one is None"):
        worker.staging_store(to_wire(WRITE), str(tmp_path / "store"))


def test_only_the_first_worker_of_a_replica_retains_and_stores(checkpoint: Path, tmp_path: Path) -> None:
    worker = MemoryWorker(checkpoint, index=1)
    receive(worker, weights(2.0), retain_version=5)
    worker.finish_weight_update()
    worker.staging_store(to_wire(WRITE), str(tmp_path / "store"))
    assert worker.staging_store_state() is None and not (tmp_path / "store").exists()
    with pytest.raises(ValueError, match="the retained one is None"):
        worker.engine.retained.committed(WRITE)
    worker.engine.shutdown()


@pytest.mark.parametrize("itself", [False, True])
def test_a_checkpoint_is_loaded_by_the_staging_or_else_by_the_model_runner(
    worker: MemoryWorker, monkeypatch: pytest.MonkeyPatch, itself: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(worker.engine.staging, "load", lambda path: asked.append(path) or itself)
    worker.load_checkpoint("/store/v00000005")
    assert asked == ["/store/v00000005"]
    assert worker.model_runner.loaded_from == (None if itself else "/store/v00000005")
