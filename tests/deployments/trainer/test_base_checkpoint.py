import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.protocol.errors import InvalidRequest
from deployments.trainer.base_checkpoint import BaseCheckpoint, summary
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerWorker
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.hub import model_files, write_model_files
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import MANIFEST, Store
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, equal, published, started
from tests.deployments.trainer.trainer_specs import trainer_spec
from tests.tiny_models import save_tiny_llama, save_tiny_mtp, save_tiny_tied_twice, save_tiny_vision_language
from trainers.settings import OptimizerConfig, TrainerConfig
from trainers.sources import ParameterSource
from trainers.trained_policy import TrainedPolicy

Save = Callable[[Path, int], Path]
KINDS: list[tuple[Save, list[str]]] = [
    (save_tiny_tied_twice, [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]),
    (save_tiny_mtp, ["model.layers.2 (29 tensors)"]),
    (
        save_tiny_vision_language,
        [
            "model.visual.blocks.0 (12 tensors)",
            "model.visual (9 tensors)",
            "mtp.fc.weight",
            "mtp.layers.0 (11 tensors)",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
        ],
    ),
]


def spec_of(model: Path, tmp_path: Path) -> TrainerSpec:
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2))
    return trainer_spec(model, tmp_path / "state" / "store", config=config, chunk_bytes=1 << 18)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_what_is_not_trained_stays_as_it_was_read_although_the_directory_is_overwritten(
    tmp_path: Path,
) -> None:
    """In place, as `cp` does: a mapping would have the new file's bytes, or none."""
    tower = {"visual.weight": torch.ones(5000)}
    save_file(tower, tmp_path / "model.safetensors")
    base = BaseCheckpoint(tmp_path)
    frozen = base.read(["visual.weight"], tmp_path)
    save_file({"visual.weight": torch.zeros(5000)}, tmp_path / "other")
    shutil.copyfile(tmp_path / "other", tmp_path / "model.safetensors")
    assert equal(frozen, tower)


@pytest.mark.slow
@pytest.mark.parametrize(("save", "untrained"), [pytest.param(*kind, id=kind[0].__name__) for kind in KINDS])
def test_a_publisher_of_a_part_sends_the_rest_and_a_stored_version_is_a_complete_checkpoint(
    save: Save, untrained: list[str], tmp_path: Path, controller: ControllerInProcess
) -> None:
    model = save(tmp_path / "model", 0)
    spec = spec_of(model, tmp_path)
    worker = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    assert sorted(worker.load(("127.0.0.1", 0)).untrained) == sorted(untrained)
    before = tensors_of(model)
    worker.step(BATCH)
    published(worker)
    assert controller.received.keys() == before.keys()
    same = {name for name, tensor in controller.received.items() if torch.equal(tensor, before[name])}
    assert {*untrained} <= {*summary(sorted(same))} and "lm_head.weight" not in same
    saved = Path(worker.save(str(tmp_path / "saved")).path)
    assert worker.flush(30.0)
    stored = controller.directory_of(1)
    check_files(stored, 1)
    expected = controller.received
    assert equal(tensors_of(stored), expected) and equal(tensors_of(saved), expected)
    for directory in (stored, saved):
        config = AutoConfig.from_pretrained(directory)
        assert type(config) is type(AutoConfig.from_pretrained(model))
        assert config.architectures == AutoConfig.from_pretrained(model).architectures
    assert not AutoModelForCausalLM.from_pretrained(stored, output_loading_info=True)[1]["missing_keys"]
    # It is what a restarted trainer resumes from, and publishes as it is.
    sent = controller.received
    published(started(spec, controller))
    assert equal(controller.received, sent) and controller.received is not sent


@pytest.mark.slow
def test_a_trainer_that_starts_from_another_publishers_version_sends_all_of_it(
    tmp_path: Path, controller: ControllerInProcess
) -> None:
    model = save_tiny_mtp(tmp_path / "model", 0)
    spec = spec_of(model, tmp_path)
    worker = started(spec, controller)
    published(worker)
    assert worker.flush(30.0)
    changed = {name: tensor + 1.0 for name, tensor in tensors_of(model).items()}
    report = controller.publish_as("another")
    version, fleet_id = report.version, controller.status.fleet_id
    committed = CommittedVersion(version=version, label=None, fleet_id=fleet_id, tensors=changed)
    store = Store(Path(spec.store_dir))
    path = write_version(committed, store, partial(write_model_files, model_files(model)))
    as_committed = replace(store.manifest_of(version), digest=report.digest)  # nobody read its tensors
    (path / MANIFEST).write_text(as_committed.encode())
    for trainer in (worker, started(spec, controller)):
        trainer.load_version(version)
        published(trainer)
        assert equal(controller.received, changed)


def test_tied_weights_that_differ_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    model = save_tiny_tied_twice(tmp_path / "model", 0)
    tensors = tensors_of(model)
    tensors["lm_head.weight"] += 1.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="says tie_word_embeddings, and the checkpoint stores an output"):
        TrainedPolicy.load(model)


def test_a_module_of_which_the_trainer_has_a_part_is_refused(
    tmp_path: Path, controller: ControllerInProcess
) -> None:
    model = save_tiny_llama(tmp_path / "model", 0)
    tensors = tensors_of(model)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(256)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj\.weight' is trained without '\S+up_proj\.bias'"):
        started(spec_of(model, tmp_path), controller)


def test_a_parameter_that_would_not_be_sent_is_refused(tmp_path: Path) -> None:
    model = TrainedPolicy.load(save_tiny_llama(tmp_path / "model", 0)).model

    def forgetful(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}

    with pytest.raises(ValueError, match=r"parameters would not be sent, first \['model\.layers"):
        ParameterSource(model, convert=forgetful).specs()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    with pytest.raises(ValueError, match=r"would not be sent, first \['model\.norm\.weight'\]"):
        ParameterSource(model).specs()


def test_a_checkpoint_without_safetensors_has_no_names(tmp_path: Path) -> None:
    assert BaseCheckpoint(tmp_path).names == frozenset() and BaseCheckpoint(tmp_path).frozen(["a"]) == []


@pytest.mark.slow
def test_versions_have_their_tokenizer_though_the_model_is_overwritten_and_the_version_before_is_gone(
    tmp_path: Path, controller: ControllerInProcess
) -> None:
    model = save_tiny_llama(tmp_path / "model", 0)
    spec = spec_of(model, tmp_path)
    first = started(spec, controller)
    first.step(BATCH)
    published(first)
    assert first.flush(30.0)
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text("another model's")
    worker = started(spec, controller)  # resumes from version 1
    shutil.rmtree(Path(spec.store_dir) / "v00000001")  # as retention does after a few rounds
    published(worker)
    assert worker.flush(30.0)
    assert (controller.directory_of(2) / "tokenizer.json").read_text() == tokenizer


def test_the_configuration_of_a_whole_gets_the_dtype_of_its_weights(tmp_path: Path) -> None:
    model = save_tiny_vision_language(tmp_path / "model", 0)
    policy = TrainedPolicy.load(model)
    target = tmp_path / "target"
    target.mkdir()
    BaseCheckpoint(model).write_files(target, policy.model, "bfloat16")
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["text_config"]["dtype"] == "bfloat16"


def test_a_full_disk_is_reported_and_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", 0)
    policy, target = TrainedPolicy.load(model), tmp_path / "target"
    target.mkdir()
    (target / ".model.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(InvalidRequest, match=r"cannot be written to \S+/target: .*No space left on device"):
        BaseCheckpoint(model).write(target, policy.model, "float32", tensors_of(model))
    assert not list(target.glob("model.safetensors*"))
    BaseCheckpoint(model).write(target, policy.model, "float32", tensors_of(model))
    assert equal(tensors_of(target), tensors_of(model))
