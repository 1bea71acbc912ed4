"""What an engine takes from its configuration: its staging, and the schema that updates must have."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, VllmConfig

from deployments.protocol.poll import Outcome
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.transfer_engine import check_draft, make_staging
from tests.deployments.weights.staging.memory_worker import (
    MemoryWorker,
    Model,
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


def configuration(method: str | None, draft: str = "org/draft") -> Any:
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=draft))
    return SimpleNamespace(
        model_config=SimpleNamespace(model="org/model"), speculative_config=speculative if method else None
    )


def test_a_draft_from_the_served_checkpoint_is_refused() -> None:
    expected = (
        r"^speculative decoding with method 'mtp' loads a draft model from .*, 'org/model', and updates"
    )
    with pytest.raises(ValueError, match=expected):
        check_draft(configuration("mtp", draft="org/model"))


@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
def test_other_drafts_are_no_part_of_a_version(method: str | None) -> None:
    check_draft(configuration(method))


@pytest.mark.parametrize("method", ["ngram", "suffix", "extract_hidden_states"])
def test_a_method_without_weights_may_name_the_served_model(method: str) -> None:
    check_draft(configuration(method, draft="org/model"))


Start = Callable[..., MemoryWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[MemoryWorker] = []

    def start(**options: Any) -> MemoryWorker:
        started.append(MemoryWorker("org/tiny", **options))
        return started[-1]

    yield start
    for worker in started:
        worker.engine.shutdown()


@pytest.mark.parametrize("shadow", [False, True], ids=["host", "shadow"])
def test_an_update_without_one_tensor_is_rejected(
    tmp_path: Path, hub: FakeHub, start: Start, shadow: bool
) -> None:
    hub.repositories["org/tiny"] = write_checkpoint(tmp_path / "snapshot")
    worker = start(shadow=shadow)
    receive(worker, weights(2.0)[:1])
    state = verify(worker)
    assert state.outcome is Outcome.REJECTED and state.message.startswith("'b' is missing")


def test_a_replica_without_hub_files_takes_the_schema_of_its_stored_version(
    tmp_path: Path, hub: FakeHub, start: Start
) -> None:
    worker = start(loaded=write_checkpoint(tmp_path / "v00000001"))
    receive(worker, weights(2.0)[:1])
    assert verify(worker).message.startswith("'b' is missing")
