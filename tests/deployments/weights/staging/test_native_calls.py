"""What the worker extension does for vLLM's own transfer engines (`staging: none`)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest
from tests.deployments.weights.staging.memory_worker import MemoryWorker, write_checkpoint


class NativeEngine:
    """An engine of vLLM's, as far as the worker calls it."""

    def __init__(self, **communicator: bool) -> None:
        self.updates: list[dict[str, Any]] = []
        if communicator:
            self.model_update_group = SimpleNamespace(**communicator)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.updates.append(update_info)


@pytest.fixture
def worker(tmp_path: Path) -> MemoryWorker:
    return MemoryWorker(write_checkpoint(tmp_path / "model"), index=1)


@pytest.mark.parametrize(("disabled", "available"), [(True, True), (False, False)])
def test_a_disabled_communicator_is_an_error(worker: MemoryWorker, disabled: bool, available: bool) -> None:
    worker.weight_transfer_engine = NativeEngine(disabled=disabled, available=available)
    with pytest.raises(RuntimeError, match="vLLM has disabled its NCCL communicator"):
        worker.native_check_connected()


@pytest.mark.parametrize("communicator", [{"disabled": False, "available": True}, {}], ids=["nccl", "ipc"])
def test_a_communicator_that_works_and_an_engine_without_one_pass(
    worker: MemoryWorker, communicator: dict[str, bool]
) -> None:
    worker.weight_transfer_engine = NativeEngine(**communicator)
    worker.native_check_connected()


class Step3TextForCausalLM(torch.nn.Module):
    """By name a model of vLLM whose loading copies into parameters itself."""


def test_a_model_whose_reload_would_keep_weights_is_refused(worker: MemoryWorker) -> None:
    worker.weight_transfer_engine = NativeEngine(disabled=False, available=True)
    worker.model.add_module("language_model", Step3TextForCausalLM())
    with pytest.raises(RuntimeError, match="'none' is not possible: vLLM's Step3TextForCausalLM copies"):
        worker.native_check_connected()


def test_a_payload_reaches_vllms_engine(worker: MemoryWorker) -> None:
    engine = NativeEngine()
    worker.weight_transfer_engine = engine
    worker.start_weight_update()
    worker.native_update({"names": ["w"]})
    worker.native_update([{"names": ["for another"]}, {"names": ["b"]}])
    assert engine.updates == [{"names": ["w"]}, {"names": ["b"]}]


def test_the_digest_is_that_of_the_live_parameters(worker: MemoryWorker) -> None:
    before = worker.native_digest()
    tensors = worker.model.tensors()
    assert before == version_digest(list(tensors), digests(list(tensors.values())))
    worker.model.w.fill_(1.0)
    assert worker.native_digest() != before
