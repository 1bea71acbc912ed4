"""One rank without Ray and without a fleet: what is published and what is stored."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.protocol.errors import InvalidRequest, JournalError
from deployments.protocol.poll import InitialWeights
from deployments.trainer.spec import StoreStatus, TrainerSpec
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.owner import claim
from deployments.weights.store.versions import MANIFEST, Store
from deployments.weights.wire.proof_sequences import proof_sequences
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import (
    BATCH,
    equal,
    everything,
    published,
    saved,
    spec_of,
    started,
    stored,
    trained,
)
from tests.deployments.trainer.trainer_specs import with_config
from tests.fake_hub import FakeHub
from trainers.settings import LossConfig
from trainers.trained_policy import TrainedPolicy
from trainers.trajectory import parse_trajectories
from trainers.trajectory_arrays import to_bytes

pytestmark = pytest.mark.slow  # optimizer steps


def test_what_is_published_is_what_save_writes_and_what_the_store_has(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
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
    stored = controller.directory_of(1)
    assert equal(load_file(stored / "model.safetensors"), saved)
    assert (stored / "tokenizer.json").is_file()
    assert json.loads((stored / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    manifest = Store(Path(spec.store_dir)).manifest_of(1)
    assert (manifest.version, manifest.label, manifest.trainer_step) == (1, "first", 1)
    assert manifest.fleet_id == controller.status.fleet_id and manifest.digest is not None


@pytest.mark.parametrize(
    ("kind", "wire_dtype"),
    [("merged", None), ("drafter", "bfloat16"), ("mtp", "bfloat16"), ("mtp of experts", "bfloat16")],
)
def test_adapters_and_heads_are_published_stored_and_saved_as_a_part_of_the_model(
    kind: str, wire_dtype: str | None, tmp_path: Path, controller: ControllerInProcess
) -> None:
    spec = spec_of(tmp_path, kind, wire_dtype=wire_dtype)
    worker = trained(spec, controller, steps=1)
    sent = dict(controller.received)
    whole = everything(worker)
    assert equal(sent, {name: tensor.to(sent[name].dtype) for name, tensor in whole.items()})
    assert equal(stored(spec, 1), sent) and equal(saved(worker, tmp_path / "saved"), whole)
    first = load_file(Path(spec.model) / "model.safetensors")
    if kind == "drafter":
        head = load_file(tmp_path / "head" / "model.safetensors")
        first |= {f"drafter.{name}": tensor for name, tensor in head.items()}
    assert sent.keys() == first.keys()
    changed = {name for name in first if not torch.equal(sent[name], first[name].to(sent[name].dtype))}
    part = {"merged": "proj", "drafter": "drafter.fc.weight", "mtp": "mtp."}.get(
        kind, ".2.mlp.shared_experts."
    )
    learned = {name for name in first if part in name}
    assert learned <= changed
    assert {sent[name].dtype for name in learned} == {torch.bfloat16 if wire_dtype else torch.float32}
    assert kind != "merged" or all("proj" in name for name in changed)


def test_scores_are_those_of_what_was_published(spec: TrainerSpec, controller: ControllerInProcess) -> None:
    worker = started(replace(spec, proof_sequences=3), controller)
    before = worker.score()
    worker.step(BATCH)
    published(worker, "first")
    scores = worker.score()
    assert len(scores) == 3 and scores != before
    assert worker.flush(30.0)
    stored = TrainedPolicy.load(controller.directory_of(1))
    first = proof_sequences(3, stored.vocabulary_size)[0]
    with torch.no_grad():
        logits = stored.model(input_ids=torch.tensor([first.prompt])).logits[0, -1]
    assert scores[0] == pytest.approx(float(torch.log_softmax(logits, -1)[first.token]), abs=1e-4)


def test_a_version_names_the_steps_that_are_in_it(spec: TrainerSpec, controller: ControllerInProcess) -> None:
    worker = started(spec, controller)
    for steps in (["a/1", "b/1"], ["a/2"]):
        for label in steps:
            worker.step(BATCH, label=label)
        published(worker, steps[-1])
        assert worker.flush(30.0)
    again = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    assert again.load(("127.0.0.1", 0)).labels == ("a/1", "b/1", "a/2")
    assert again.load_version(1) == ("a/1", "b/1"), "not the one that a rollback has undone"
    published(again, "rollback")
    again.step(BATCH, label="a/2")
    published(again, "a/2")
    assert again.flush(30.0)
    manifest = Store(Path(spec.store_dir)).manifest_of(4)
    assert manifest.step_labels == ("a/1", "b/1", "a/2")
    by_a_replica = replace(manifest, trainer_step=None, trainer_labels=None)
    assert by_a_replica.step_labels == ("a/2",)


def test_a_trainer_counts_on_from_a_version_that_a_replica_stored(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    """Which knows no steps. The schedule of the learning rate began anew."""
    for every, steps in ((0, 1), (1, 3)):  # without a checkpoint of these weights: the version before
        trained(with_config(spec, checkpoint_every=every), controller, steps=2)
        store = Store(Path(spec.store_dir))
        newest = store.list()[-1]
        by_a_replica = replace(store.manifest_of(newest), trainer_step=None, trainer_labels=None)
        (store.path_of(newest) / MANIFEST).write_text(by_a_replica.encode())
        again = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
        assert again.load(("127.0.0.1", 0)).step == steps


def test_a_trainer_does_not_start_in_the_store_of_another_fleet(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator moved the store away and started another fleet in its place, while this one runs."""
    store = Path(spec.store_dir)
    theirs = store / "trainer" / "checkpoints" / ".step-000001-aaaaaaaa.partial"
    monkeypatch.setattr(TrainerWorker, "_fleet", lambda self, found=controller.status: found)
    controller.close()
    store.rename(store.with_name("away"))
    theirs.mkdir(parents=True)
    claim(store, "another", Path("/state"))
    with pytest.raises(JournalError, match="belongs to fleet another"):
        started(spec, controller)
    assert theirs.is_dir()


def test_a_trainer_whose_host_has_a_store_of_its_own_keeps_the_last_versions_there(
    spec: TrainerSpec, controller: ControllerInProcess, tmp_path: Path
) -> None:
    """No replica and no controller may be on its host."""
    there = tmp_path / "its host" / "store"
    trained(replace(spec, store_dir=str(there), store_keep=2), controller, steps=4)
    assert Store(there).list() == [3, 4]


def test_a_checkpoint_is_saved_in_the_store_by_default(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    worker.step(BATCH)
    assert Path(worker.save(None).path) == Path(spec.store_dir) / "checkpoint-000001"
    Path(spec.store_dir).parent.joinpath("file").write_text("")
    with pytest.raises(InvalidRequest, match=r"path must be a directory that can be written, got .*/file/x"):
        worker.save(str(Path(spec.store_dir).parent / "file" / "x"))


def test_weights_are_cast_for_the_wire_and_the_store(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(with_config(spec, wire_dtype="bfloat16"), controller)
    worker.publish(None)
    assert {tensor.dtype for tensor in controller.received.values()} == {torch.bfloat16}
    assert worker.flush(30.0)
    config = json.loads((controller.directory_of(1) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_disk_that_fails_does_not_end_training(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    Path(spec.store_dir).rename(tmp_path / "away")
    Path(spec.store_dir).write_text("a file where a directory should be")
    worker.publish(None)
    assert worker.flush(30.0)
    status = worker.store_status()
    assert status.stored_version is None and status.store_problem is not None
    assert status.store_problem.startswith("version 1 is not in the store: JournalError: ")
    assert "Not a directory" in str(controller.status.store_problem)
    Path(spec.store_dir).unlink()
    (tmp_path / "away").rename(spec.store_dir)
    worker.publish(None)
    assert worker.flush(30.0)
    assert worker.store_status() == StoreStatus(stored_version=2, store_problem=None)


def test_a_checkpoint_is_saved_neither_anywhere_nor_over_what_is_there(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    for wrong in ("relative", "../up", "", "~nobody-of-this-name/x", "/tmp/\0", "/proc/1/x/y"):
        with pytest.raises(InvalidRequest, match="path must be"):
            worker.save(wrong)
    taken, link = tmp_path / "taken", tmp_path / "link"
    taken.mkdir()
    (taken / "config.json").write_text("mine")
    link.symlink_to(taken)
    for path in (taken, link, tmp_path / "new" / ".." / "taken", taken / "config.json"):
        with pytest.raises(InvalidRequest, match="path must be a"):
            worker.save(str(path))
    assert (taken / "config.json").read_text() == "mine" and len(list(taken.iterdir())) == 1


def test_a_model_of_the_hub_is_trained_from_where_it_was_downloaded_to(
    spec: TrainerSpec, tmp_path: Path, hub: FakeHub, controller: ControllerInProcess
) -> None:
    hub.repositories["org/tiny"] = Path(spec.model)
    worker = started(replace(spec, model="org/tiny", revision="v2"), controller)
    assert [(model, options["revision"]) for model, options in hub.asked] == [("org/tiny", "v2")]
    worker.step(BATCH)
    published(worker)
    assert worker.flush(30.0)
    stored = controller.directory_of(1)
    assert equal(load_file(stored / "model.safetensors"), controller.received)
    assert (stored / "config.json").is_file() and (stored / "tokenizer.json").is_file()
    again = started(replace(spec, model="org/tiny"), controller)
    assert again.save(str(tmp_path / "saved")).step == 1, "it goes on from the store"


def test_a_trainer_begins_with_the_fleets_version_0_or_not_at_all(
    spec: TrainerSpec, hub: FakeHub, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fleet_began_with(initial: InitialWeights) -> None:
        found = replace(controller.status, initial=initial)
        monkeypatch.setattr(TrainerWorker, "_fleet", lambda self: found)

    loaded = TrainerWorker(spec, 0, controller).load(("", 0))  # type: ignore[arg-type]
    assert loaded.initial is not None
    fleet_began_with(loaded.initial)
    started(spec, controller)
    fleet_began_with(InitialWeights(digest="0" * 32))
    with pytest.raises(ValueError, match=f"is digest {'0' * 32}, and {spec.model} has {loaded.initial} here"):
        started(spec, controller)
    hub.repositories["org/tiny"] = Path(spec.model)
    hub.commits["org/tiny"] = "b" * 40  # its branch has moved
    fleet_began_with(InitialWeights(commit="a" * 40))
    started(replace(spec, model="org/tiny"), controller)
    assert [options["revision"] for _, options in hub.asked] == ["a" * 40]


@pytest.mark.parametrize("fleet_knows", [True, False])
def test_a_rank_on_another_host_reads_the_same_model(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch, fleet_knows: bool
) -> None:
    other = InitialWeights(digest="0" * 32)
    if fleet_knows:
        found = replace(controller.status, initial=other)
        monkeypatch.setattr(TrainerWorker, "_fleet", lambda self: found)
    monkeypatch.setattr("deployments.trainer.worker.gather_from_ranks", lambda own: [other, own])
    nothing_committed = [(0, (), None)], None
    monkeypatch.setattr("deployments.trainer.stored_weights.from_rank_0", lambda own: nothing_committed)
    rank = TrainerWorker(spec, 1, controller)  # type: ignore[arg-type]
    said = "restore it" if fleet_knows else "is not the same on all hosts of the trainer"
    with pytest.raises(ValueError, match=said):
        rank.load(("192.0.2.1", 0))


def test_a_model_that_is_rewritten_while_a_trainer_reads_it_is_not_trained(
    spec: TrainerSpec, controller: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(spec.model) / "model.safetensors"
    read = TrainedPolicy.load

    def rewritten(*args: Any, **options: Any) -> TrainedPolicy:
        file.write_bytes(file.read_bytes())
        return read(*args, **options)

    monkeypatch.setattr(TrainedPolicy, "load", rewritten)
    with pytest.raises(ValueError, match="was changed while it was loaded"):
        started(spec, controller)


def with_version(version: int) -> list[Any]:
    return [
        each | {"weight_versions": [{"version": version, "start": 0, "end": len(each["token_ids"])}]}
        for each in BATCH
    ]


def test_rollouts_that_the_trainer_does_not_agree_with_are_warned_of(
    spec: TrainerSpec, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    metrics = worker.step(with_version(3), 4)
    assert metrics["staleness_max"] == 1 and not caplog.records, "older weights explain it"
    metrics = worker.step(with_version(5), 5)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert metrics["logprob_difference_mean"] > 0.05
    assert f"differ by {metrics['logprob_difference_mean']:.4f} on average" in record.getMessage()


def test_a_warm_start_needs_tokens_alone(spec: TrainerSpec, controller: ControllerInProcess) -> None:
    config = spec.config.model_copy(update={"loss": LossConfig(name="sft")})
    worker = started(replace(spec, config=config), controller)
    bare = [{name: each[name] for name in ("prompt_token_ids", "token_ids")} for each in BATCH]
    first, second = worker.step(bare), worker.step(bare)
    assert second["loss"] < first["loss"] and "importance_mean" not in first


def test_a_batch_brings_settings_for_its_own_step(spec: TrainerSpec, controller: ControllerInProcess) -> None:
    worker = started(spec, controller)
    batch = parse_trajectories(BATCH, vocabulary_size=1000, max_length=100)
    own = {"learning_rate": 0.125}
    rates = [
        worker.step(BATCH)["learning_rate"],
        worker.step(to_bytes(batch, json.dumps(own)))["learning_rate"],
        worker.step(BATCH, settings=own)["learning_rate"],
        worker.step(to_bytes(batch))["learning_rate"],
    ]
    assert rates == pytest.approx([0.2e-3, 0.4 * 0.125, 0.6 * 0.125, 0.8e-3]), "the spec warms up for 4 steps"
    wrong = "momentum: Extra inputs are not permitted; loss.clip_low: Input should be greater than 0"
    refused = {"momentum": 0.9, "loss": {"clip_low": -1}}
    for call in (
        lambda: worker.step(to_bytes(batch, json.dumps(refused))),
        lambda: worker.step(BATCH, settings=refused),
    ):
        with pytest.raises(InvalidRequest) as error:
            call()
        assert sorted(str(error.value).split("; ")) == sorted(wrong.split("; "))
    assert worker.step(BATCH)["step"] == 5


@pytest.mark.parametrize(("device", "threads"), [("cpu", 1), ("cuda", 3)])
def test_publish_on_a_cpu_uses_one_core(device: str, threads: int) -> None:
    worker: Any = object.__new__(TrainerWorker)
    worker._spec = SimpleNamespace(device=device)
    worker._publish = lambda label, after: torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert worker.publish(None) == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_bad_batch_is_refused_and_changes_nothing(
    spec: TrainerSpec, controller: ControllerInProcess
) -> None:
    worker = started(spec, controller)
    with pytest.raises(InvalidRequest, match="trajectory 0: loss_mask must have 2 entries"):
        worker.step([BATCH[0] | {"loss_mask": [True]}, BATCH[1]])
    with pytest.raises(InvalidRequest, match="trajectory 0: teacher: the loss 'jsd' expects one of each"):
        worker.step(BATCH, settings={"loss": {"name": "jsd"}})
    assert worker.step(BATCH)["step"] == 1
