"""One rank without Ray and without a fleet: what is published, what is stored, and what a restart finds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.errors import InvalidRequest, RoundAborted
from deployments.protocol import RoundReport
from deployments.trainer.messages import LoadedTrainer, StoreStatus
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.versions import Store
from deployments.weights.wire.digest import digest
from tests.deployments.fake_controller import FakeController
from tests.deployments.trainer.trainer_specs import trainer_spec, with_config
from tests.tiny_models import save_tiny_llama, tiny_llama
from trainers.settings import OptimizerConfig, TrainerConfig

BATCH: dict[str, Any] = {
    "trajectories": [
        {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-1.0, -1.0], "advantage": 1.0},
        {"prompt_token_ids": [5, 6], "token_ids": [9], "logprobs": [-2.0], "advantage": -1.0},
    ]
}


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    return trainer_spec(
        save_tiny_llama(tmp_path / "model", seed=0, tied=True),
        tmp_path / "state" / "store",
        chunk_bytes=1 << 18,
        config=TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4)),
        optimizer_state_every=1,
    )


def started(spec: TrainerSpec, controller: FakeController) -> TrainerWorker:
    worker = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    worker.load(("127.0.0.1", 0))
    return worker


def published(worker: TrainerWorker, label: str | None = None) -> RoundReport:
    report = worker.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_what_is_published_is_what_save_writes_and_what_the_store_has(
    spec: TrainerSpec, tmp_path: Path
) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    assert worker.step(BATCH)["step"] == 1
    report = published(worker, "first")
    assert (report.version, report.label, report.phase) == (1, "first", "committed")
    checkpoint = worker.save(str(tmp_path / "saved"))
    assert (checkpoint.path, checkpoint.step) == (str(tmp_path / "saved"), 1)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert equal(controller.received, saved)
    assert not equal(saved, load_file(Path(spec.model) / "model.safetensors"))
    assert worker.flush(30.0)
    stored = Path(controller.stored_versions[1])
    assert equal(load_file(stored / "model.safetensors"), saved)
    assert (stored / "tokenizer.json").is_file()
    assert json.loads((stored / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_manifest_of_a_stored_version_says_what_it_is(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    worker.step(BATCH)
    published(worker, "first")
    assert worker.flush(30.0)
    manifest = Store(Path(spec.store_dir)).manifest_of(1)
    assert (manifest.version, manifest.label, manifest.trainer_step) == (1, "first", 1)
    assert {name: tensor.digest for name, tensor in manifest.tensors.items()} == {
        name: f"{digest(tensor):016x}" for name, tensor in controller.received.items()
    }


def test_a_checkpoint_is_saved_beside_the_store_by_default(spec: TrainerSpec) -> None:
    worker = started(spec, FakeController())
    worker.step(BATCH)
    assert Path(worker.save(None).path) == Path(spec.store_dir).parent / "checkpoint-000001"
    Path(spec.store_dir).parent.joinpath("file").write_text("")
    with pytest.raises(InvalidRequest, match=r"path must be a directory that can be written, got .*/file/x"):
        worker.save(str(Path(spec.store_dir).parent / "file" / "x"))


def test_the_store_has_what_was_published_though_a_step_follows_at_once(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    worker.step(BATCH)
    worker.publish(None)
    sent = {name: tensor.clone() for name, tensor in controller.received.items()}
    worker.step(BATCH)
    assert worker.flush(30.0)
    assert equal(load_file(Path(controller.stored_versions[1]) / "model.safetensors"), sent)


def test_a_restarted_trainer_resumes_from_the_newest_version(spec: TrainerSpec) -> None:
    controller = FakeController()
    straight = started(spec, controller)
    for _ in range(2):
        straight.step(BATCH)
        straight.publish(None)
        straight.save_optimizer_state()
        assert straight.flush(30.0)
    resumed = TrainerWorker(spec, 0, FakeController())  # type: ignore[arg-type]
    parameters = sum(parameter.numel() for parameter in tiny_llama(0, tied=True).parameters())
    assert resumed.load(("", 0)) == LoadedTrainer(version=2, step=2, parameters=parameters)
    assert resumed.step(BATCH) | {"step_s": 0} == straight.step(BATCH) | {"step_s": 0}
    assert controller.version == 2


def test_a_restart_without_optimizer_state_resumes_the_schedule(spec: TrainerSpec) -> None:
    worker = started(replace(spec, optimizer_state_every=0), FakeController())
    worker.step(BATCH)
    worker.publish(None)
    worker.save_optimizer_state()
    assert worker.flush(30.0)
    metrics = started(spec, FakeController()).step(BATCH)
    assert metrics["step"] == 2 and metrics["learning_rate"] == pytest.approx(1e-3 * 2 / 5)


def test_rolling_back_publishes_the_old_weights_as_a_newer_version(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    worker.step(BATCH)
    worker.publish(None)
    first = dict(controller.received)
    worker.step(BATCH)
    worker.publish(None)
    assert worker.flush(30.0) and not equal(controller.received, first)
    worker.load_version(1)
    assert published(worker, "rollback to 1").version == 3
    assert equal(controller.received, first)
    with pytest.raises(InvalidRequest, match="version 9 is not in"):
        worker.load_version(9)


def test_an_aborted_round_raises_and_the_next_one_connects_again(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    controller.abort_next = RoundAborted("no replica is left")
    with pytest.raises(RoundAborted, match="no replica is left"):
        worker.publish(None)
    assert controller.calls[-1] == "release"
    assert published(worker).version == 1
    assert controller.calls.count("connect") == 2


def test_a_connection_lasts_as_long_as_the_membership(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    worker.publish(None)
    worker.publish(None)
    assert controller.calls.count("connect") == 1
    controller.epoch = 2
    worker.publish(None)
    assert controller.calls.count("connect") == 2
    controller.connected_to = "somebody else"
    worker.publish(None)
    assert controller.calls.count("connect") == 3


def test_weights_are_cast_for_the_wire_and_the_store(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(with_config(spec, wire_dtype="bfloat16"), controller)
    worker.publish(None)
    assert {tensor.dtype for tensor in controller.received.values()} == {torch.bfloat16}
    assert worker.flush(30.0)
    config = json.loads((Path(controller.stored_versions[1]) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "non-empty list"),
        ({"trajectories": [{"token_ids": [1]}]}, "needs the field"),
        (BATCH | {"lr": 1}, r"nothing else, got \['lr'\]"),
        ({"trajectories": [BATCH["trajectories"][0] | {"token_ids": [7, 999]}]}, r"\[0, 258\), got 999"),
    ],
)
def test_a_bad_batch_is_refused_and_changes_nothing(
    spec: TrainerSpec, body: dict[str, Any], message: str
) -> None:
    worker = started(spec, FakeController())
    with pytest.raises(InvalidRequest, match=message):
        worker.step(body)
    assert worker.step(BATCH)["step"] == 1


def test_a_disk_that_fails_does_not_end_training(spec: TrainerSpec) -> None:
    controller = FakeController()
    worker = started(spec, controller)
    Path(spec.store_dir).parent.mkdir(parents=True, exist_ok=True)
    Path(spec.store_dir).write_text("a file where a directory should be")
    worker.publish(None)
    assert worker.flush(30.0)
    status = worker.store_status()
    assert status.stored_version is None and status.store_problem is not None
    assert status.store_problem.startswith("version 1 is not in the store: NotADirectoryError: ")
    Path(spec.store_dir).unlink()
    worker.publish(None)
    assert worker.flush(30.0)
    assert worker.store_status() == StoreStatus(stored_version=2, store_problem=None)
