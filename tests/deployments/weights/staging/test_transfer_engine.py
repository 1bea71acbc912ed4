import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import CompilationMode, VllmConfig

from deployments.protocol.poll import Outcome
from deployments.weights.staging.drafted_model import PolicyAndDrafter, with_drafter
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.transfer_engine import make_staging
from deployments.weights.store.versions import DRAFTER
from deployments.weights.wire.checkpoint_schema import TensorSpec
from deployments.weights.wire.chunk_layout import ReceivedChunk
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest
from tests.deployments.weights.staging.memory_worker import (
    MemoryWorker,
    Model,
    chunks_of,
    receive,
    verify,
    weights,
    write_checkpoint,
)
from tests.fake_hub import FakeHub


def configured(staging: str) -> VllmConfig:
    """Of an engine whose model cannot be constructed a second time: the configuration does not name one."""
    config = VllmConfig(additional_config={"staging": staging})
    config.compilation_config.mode = CompilationMode.NONE
    return config


def test_a_model_that_cannot_be_constructed_twice_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^staging 'device' is not possible on this CPU: .*; 'host' is$"
    ) as e:
        make_staging(configured("device"), torch.device("cpu"), Model())
    assert "compiled" not in str(e.value)


def test_automatic_staging_falls_back_to_host() -> None:
    assert isinstance(make_staging(configured("automatic"), torch.device("cpu"), Model()), HostStaging)


def configuration(method: str | None) -> Any:
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model="org/draft"))
    return SimpleNamespace(
        model_config=SimpleNamespace(model="org/model"), speculative_config=speculative if method else None
    )


def test_a_drafter_that_updates_would_not_reach_is_refused() -> None:
    expected = r"^updates would not reach the drafter .* method 'eagle3': expected one model .*, found 0"
    with pytest.raises(ValueError, match=expected):
        with_drafter(configuration("eagle3"), Model())


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "extract_hidden_states"])
def test_without_a_drafter_an_update_is_of_the_policy(method: str | None) -> None:
    model = Model()
    assert with_drafter(configuration(method), model) is model


def test_the_schema_of_a_hub_model_is_read_from_its_cache(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/tiny"] = write_checkpoint(tmp_path / "snapshot")
    worker = MemoryWorker("org/tiny")
    receive(worker, weights(2.0)[:1])
    state = verify(worker)
    assert state.outcome is Outcome.REJECTED and state.message.startswith("'b' is missing")
    worker.engine.shutdown()


def test_a_replica_without_hub_files_takes_the_schema_of_its_stored_version(
    tmp_path: Path, hub: FakeHub
) -> None:
    worker = MemoryWorker("org/tiny", loaded=write_checkpoint(tmp_path / "v00000001"))
    receive(worker, weights(2.0)[:1])
    assert verify(worker).message.startswith("'b' is missing")
    worker.engine.shutdown()


def test_verifying_while_the_last_payload_is_staged_finalizes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = MemoryWorker(write_checkpoint(tmp_path / "model"))
    asked, thread, staging = threading.Event(), worker.engine._thread, worker.engine.staging
    run = Mock(side_effect=lambda *work, **limit: (asked.set(), type(thread).run(thread, *work, **limit)))
    monkeypatch.setattr(thread, "run", run)
    finalize = Mock(wraps=staging.finalize)
    monkeypatch.setattr(staging, "finalize", finalize)

    def slow() -> Iterator[ReceivedChunk]:
        assert asked.wait(20.0)
        yield from chunks_of(weights(2.0))

    worker.engine.payloads["p"] = slow
    worker.staging_receive({"payload": "p"}, share=1.0, begins=True, retain_version=None)
    assert verify(worker).outcome is Outcome.DONE and run.called
    finalize.assert_called_once()
    worker.engine.shutdown()


# What the worker extension does for vLLM's own transfer engines (`staging: none`).


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


def test_vllms_own_engines_would_not_reach_a_drafter(
    worker: MemoryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.weight_transfer_engine = NativeEngine()
    monkeypatch.setattr(worker.model_runner, "get_draft_model", Model)
    with pytest.raises(
        RuntimeError, match="'none' is not possible: vLLM's update would not reach the drafter"
    ):
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


# A drafter beside the policy.


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)


class Drafter(Model):
    """Its `head` is the policy's `w`, as far as the names tell."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()


@pytest.fixture
def drafted(worker: MemoryWorker) -> MemoryWorker:
    engine = worker.engine
    shared = {"head": "w"}
    engine.updated = PolicyAndDrafter(worker.model, Drafter(), own_checkpoint=True, shared=shared)
    engine.staging = HostStaging(engine.updated, worker.vllm_config.model_config)
    specs = {"w": (2, 3), "b": (3,), "head.weight": (2, 3)}
    engine._drafter = {
        DRAFTER + name: TensorSpec(dtype="float32", shape=shape) for name, shape in specs.items()
    }
    assert engine.schema is not None
    engine.schema = {**engine.schema, **engine._drafter}
    return worker


def of_drafter(*names: str, value: float = 3.0) -> list[tuple[str, torch.Tensor]]:
    shapes = {"w": (2, 3), "b": (3,), "head.weight": (2, 3)}
    return [(DRAFTER + name, torch.full(shapes[name], value)) for name in names]


@pytest.mark.parametrize(
    ("sent", "came"),
    [
        ([], False),
        (of_drafter("w", "b"), True),
        ([*of_drafter("w", "b"), *of_drafter("head.weight", value=2.0)], True),
    ],
    ids=["none", "without what is shared", "whole"],
)
def test_a_version_says_whether_it_brings_a_drafter(
    drafted: MemoryWorker, sent: list[tuple[str, torch.Tensor]], came: bool
) -> None:
    receive(drafted, weights(2.0) + sent)
    state = verify(drafted)
    assert (state.outcome, state.drafter) == (Outcome.DONE, came), state.message
    drafted.engine.shutdown()


class Mtp(Model):
    """It has embeddings of its own, which come as the policy's."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights([(name.removeprefix("mtp."), tensor) for name, tensor in weights])


def multi_token(*names: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"mtp.{name}", tensor) for name, tensor in weights(3.0) if name in names]


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "unused"])
@pytest.mark.parametrize(
    ("sent", "came", "message"),
    [
        (multi_token(), False, ""),
        (multi_token("w", "b"), True, ""),
        (multi_token("w"), None, "'mtp.b' is missing"),
    ],
    ids=["none", "whole", "half"],
)
def test_multi_token_prediction_may_be_left_out_as_a_whole(
    tmp_path: Path, drafts: bool, sent: list[tuple[str, torch.Tensor]], came: bool | None, message: str
) -> None:
    """transformers' models do not have it."""
    save_file(dict(weights(0.0) + multi_token("w", "b")), tmp_path / "model.safetensors")
    worker = MemoryWorker(tmp_path)
    engine = worker.engine
    if drafts:
        engine.updated = PolicyAndDrafter(worker.model, Mtp(), own_checkpoint=False, shared={})
        engine.staging = HostStaging(engine.updated, worker.vllm_config.model_config)
    receive(worker, weights(2.0) + sent)
    state = verify(worker)
    assert state.message.startswith(message) and bool(state.message) == bool(message)
    assert state.drafter == (came if drafts else None)
    engine.shutdown()


def test_what_policy_and_drafter_share_must_be_equal(drafted: MemoryWorker) -> None:
    receive(drafted, weights(2.0) + of_drafter("w", "b", "head.weight"))
    state = verify(drafted)
    assert state.outcome is Outcome.REJECTED
    assert state.message.startswith("drafter.head.weight must equal a tensor of the policy")
    drafted.engine.shutdown()


def test_a_drafter_for_a_fleet_without_one_is_refused(worker: MemoryWorker) -> None:
    receive(worker, weights(2.0) + of_drafter("w"))
    assert verify(worker).message == "'drafter.w' is not a tensor of this model"
    worker.engine.shutdown()
