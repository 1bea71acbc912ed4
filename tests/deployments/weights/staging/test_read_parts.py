"""A worker reads a checkpoint by itself: it takes what has the stated digests, and nothing else."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.protocol.poll import FilePart, Outcome
from deployments.weights.staging.staged_update import StagingState, from_wire, to_wire
from deployments.weights.store.checkpoint_files import Checkpoint, stated
from deployments.weights.store.file_read import FileRead
from tests.deployments.weights.staging.memory_worker import MemoryWorker, Tensors, weights, write_checkpoint

TIMEOUT_S = 20.0


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[MemoryWorker]:
    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    yield worker
    worker.engine.shutdown()


def parts_of(directory: Path, tensors: Tensors, config: object = None) -> list[FilePart]:
    """A checkpoint of these tensors, each in a part of its own."""
    directory.mkdir(exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(str(directory), [directory], 1)
    checkpoint.close()
    return [stated(part) for part in checkpoint.parts]


def read(worker: MemoryWorker, parts: list[FilePart], **options: Any) -> StagingState:
    for index, part in enumerate(parts):
        arguments = {"share": 1.0, "begins": index == 0, "retain_version": None} | options
        worker.staging_read(to_wire(part), **arguments)
    worker.engine._thread.submit(lambda: None).result(TIMEOUT_S)  # behind what was submitted before
    return from_wire(StagingState, worker.staging_verify())


def test_a_stored_versions_drafter_is_left_out_where_there_is_none(
    tmp_path: Path, worker: MemoryWorker
) -> None:
    """A fleet whose drafter was configured away can still go back."""
    (tmp_path / "old" / "drafter").mkdir(parents=True)
    save_file({"d": torch.ones(3)}, tmp_path / "old" / "drafter" / "model.safetensors")
    parts = parts_of(tmp_path / "old", weights(2.0))
    assert parts[-1].names == ("drafter.d",)
    state = read(worker, parts)
    assert (state.outcome, state.message) == (Outcome.DONE, "")
    worker.finish_weight_update()
    assert all(torch.equal(live(worker)[name], tensor) for name, tensor in weights(2.0))


def live(worker: MemoryWorker) -> dict[str, torch.Tensor]:
    return worker.model.tensors()


def test_a_file_is_staged_and_swapped_like_a_payload(tmp_path: Path, worker: MemoryWorker) -> None:
    state = read(worker, parts_of(tmp_path / "new", weights(2.0)))
    assert (state.outcome, state.message, state.payloads_done) == (Outcome.DONE, "", 2)
    assert len(state.digest) == 32
    assert not any(tensor.any() for tensor in live(worker).values())
    with (tmp_path / "new" / "model.safetensors").open("r+b") as file:  # after it was verified
        file.write(b"\xff" * os.fstat(file.fileno()).st_size)
    (tmp_path / "new" / "model.safetensors").unlink()  # its user may remove it
    worker.finish_weight_update()
    assert all(torch.equal(live(worker)[name], tensor) for name, tensor in weights(2.0))


def _changed(directory: Path, parts: list[FilePart]) -> list[FilePart]:
    save_file(dict(weights(5.0)), directory / "model.safetensors")
    return parts


def _gone(directory: Path, parts: list[FilePart]) -> list[FilePart]:
    (directory / "model.safetensors").unlink()
    return parts


SPOILED: dict[str, tuple[Callable[[Path, list[FilePart]], list[FilePart]], str]] = {
    "it changed": (_changed, "was sent with digest [0-9a-f]{16} and arrived with"),
    "it is gone": (_gone, "model.safetensors cannot be read: .*No such file"),
    "an unknown dtype": (
        lambda _, parts: [replace(parts[0], dtypes=("F3",)), *parts[1:]],
        "expected dtypes of .*, got 'F3'",
    ),
    "a shape of another size": (
        lambda _, parts: [replace(part, shapes=((7,),)) for part in parts],
        r"is \[7\] of (float32|bfloat16) in [0-9]+ bytes",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_files_other_than_the_publishers_are_rejected(
    tmp_path: Path, worker: MemoryWorker, case: str
) -> None:
    spoil, message = SPOILED[case]
    state = read(worker, spoil(tmp_path / "new", parts_of(tmp_path / "new", weights(2.0))))
    assert state.outcome is Outcome.REJECTED, state
    assert re.search(message, state.message), state.message
    worker.staging_drop()
    state = read(worker, parts_of(tmp_path / "good", weights(3.0)))
    assert state.outcome is Outcome.DONE
    worker.finish_weight_update()
    assert all(torch.equal(live(worker)[name], tensor) for name, tensor in weights(3.0))


OWN = {"model_type": "llama", "rope": {"theta": 1e4, "dtype": "float32"}, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OWN | {"model_type": "qwen3"}, "model_type is 'qwen3', and the fleet's model has 'llama'"),
        (OWN | {"rope": {"theta": 1e6}}, "rope.theta is 1000000.0, and the fleet's model has 10000.0"),
        (OWN | {"rope": {"theta": 1e4, "dtype": "bfloat16"}, "pad_token_id": 3, "torch_dtype": "x"}, ""),
        ({"newer_field": 1}, ""),
        (None, ""),
    ],
)
def test_a_config_of_another_model_is_rejected(
    tmp_path: Path, worker: MemoryWorker, config: object, message: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(OWN | {"pad_token_id": 0}))
    state = read(worker, parts_of(tmp_path / "new", weights(2.0), config))
    assert (message in state.message) and (state.outcome is Outcome.REJECTED) is bool(message)


def test_dropping_the_update_stops_the_read(tmp_path: Path) -> None:
    (part, _) = parts_of(tmp_path / "new", weights(2.0))
    reading = FileRead(part, tmp_path, torch.device("cpu"))
    reading.abort()
    with pytest.raises(ValueError, match="was not read completely: the update was dropped"):
        list(reading.chunks())


def test_dropping_a_read_does_not_abort_the_transport(tmp_path: Path, worker: MemoryWorker) -> None:
    aborts: list[str] = []
    worker.engine.abort = lambda: aborts.append("x")  # type: ignore[method-assign]
    read(worker, parts_of(tmp_path / "new", weights(2.0))[:1])
    worker.staging_drop()
    worker.staging_drop()  # the follower interrupts, and the controller says DROP
    assert aborts == []
    worker.init_weight_transfer_engine({})
    worker.staging_drop()
    assert aborts == ["x"], "one that waits for its peers leaves"
