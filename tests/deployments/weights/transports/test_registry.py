"""Every record names classes that exist, and reading the registry imports nothing heavy."""

import subprocess
import sys

import pytest
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from deployments.replica.server_info import STAGED
from deployments.vllm_plugin import register
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.transports.registry import (
    BACKENDS,
    DEFAULT_TIMEOUT_S,
    TRANSPORTS,
    TrainerFacts,
    Transport,
    backend,
    trainer_init_info,
)

every_record = pytest.mark.parametrize("record", TRANSPORTS.values(), ids=TRANSPORTS)


def facts(chunk_bytes: int | None = None, largest_tensor_bytes: int = 0) -> TrainerFacts:
    return TrainerFacts(
        rank=0,
        workers=3,
        master_address="10.0.0.1",
        master_port=1234,
        chunk_bytes=chunk_bytes,
        largest_tensor_bytes=largest_tensor_bytes,
    )


def test_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys, deployments.weights.transports.registry\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['__main__', 'deployments']"


@pytest.mark.long
@pytest.mark.timeout(400)  # a fresh interpreter imports what vLLM does
def test_transport_modules_do_not_import_vllms_layers() -> None:
    """They are most of vLLM: seconds, in the middle of the first publish."""
    modules = sorted(record.module for record in TRANSPORTS.values())
    code = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
        "print(sorted({'vllm.model_executor.layers.linear', 'vllm.lora.layers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().splitlines()[-1] == "[]"


@every_record
def test_both_halves_are_registered_with_vllm(record: Transport) -> None:
    register()
    register()  # vLLM loads its plugins more than once in a process
    receiver = WeightTransferEngineFactory._registry[record.backend]()
    sender = WeightTransferTrainerFactory._registry[record.backend]()
    assert issubclass(receiver, StagedWeightTransferEngine) and not receiver.__abstractmethods__
    assert issubclass(sender, TrainerWeightTransferEngine) and not sender.__abstractmethods__
    assert receiver.__module__ == sender.__module__ == record.module
    assert TRANSPORTS[record.name] is record


@every_record
def test_vllm_has_the_native_engines_and_no_others(record: Transport) -> None:
    register()
    is_vllms = record.name in WeightTransferEngineFactory._registry and record.name != record.backend
    assert record.native is is_vllms


@pytest.mark.parametrize("name", BACKENDS)
def test_init_info_has_the_facts_of_the_connection(name: str) -> None:
    info = trainer_init_info(name, facts())
    assert isinstance(info, TrainerInitInfo) and info.backend == name
    expected = {
        "master_address": "10.0.0.1",
        "master_port": 1234,
        "world_size": 4,
        "timeout_s": DEFAULT_TIMEOUT_S,
        "packed_num_buffers": 1,  # more are not ordered by vLLM 0.32's receiver
    }
    for field, value in expected.items():
        assert getattr(info, field, value) == value


def test_buffers_of_vllms_ipc_engine_hold_the_largest_tensor() -> None:
    assert not trainer_init_info("ipc", facts()).packed
    for chunk_bytes, largest, size in [(100, 50, 100), (100, 200, 200)]:
        info = trainer_init_info("ipc", facts(chunk_bytes, largest))
        assert (info.packed, info.packed_buffer_size_bytes) == (True, size)


def test_staging_selects_our_backend_or_vllms() -> None:
    assert backend("gloo", "host") == "gloo"
    assert (backend("nccl", "device"), backend("nccl", "none")) == ("slipstream_nccl", "nccl")


@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_vllms_trainer_engines_have_a_staging_receiver(name: str) -> None:
    register()
    register()
    record = TRANSPORTS[name]
    receiver = WeightTransferEngineFactory._registry[record.staged_backend]()
    assert issubclass(receiver, StagedWeightTransferEngine) and not receiver.__abstractmethods__
    assert record.staged_backend == STAGED + name, "/server_info shows vLLM's name"
    theirs = WeightTransferEngineFactory._registry[name]()
    assert (receiver.init_info_cls, receiver.update_info_cls) == (
        theirs.init_info_cls,
        theirs.update_info_cls,
    )
    assert backend(name, "device", "vllm") == record.staged_backend
    assert backend(name, "none", "vllm") == name
