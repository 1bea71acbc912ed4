from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerWorker
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import (
    BATCH,
    equal,
    go_on,
    lines,
    saved,
    small_spec,
    started,
    trained,
)
from tests.deployments.trainer.trainer_specs import with_config
from tests.tiny_models import save_tiny_vision_language
from trainers.eagle3 import read_head, write_new_head


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    spec = small_spec(tmp_path)
    write_new_head(Path(spec.model), tmp_path / "head")
    return with_config(spec, drafter={"model": str(tmp_path / "head"), "learning_rate": 1e-3})


@pytest.fixture
def mtp_spec(tmp_path: Path) -> TrainerSpec:
    """The head is in the model's checkpoint."""
    spec = replace(small_spec(tmp_path), model=str(save_tiny_vision_language(tmp_path / "qwen", 0)))
    return with_config(spec, drafter={"learning_rate": 1e-3})


def everything(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """All weights, the drafter's with the prefix of published names."""
    return {name: tensor.clone() for name, tensor in worker._source(None)}


def drafter_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("drafter."): t for name, t in tensors.items() if name.startswith("drafter.")}


def stored(spec: TrainerSpec) -> dict[str, torch.Tensor]:
    """The only version's, by published names."""
    (version,) = Path(spec.store_dir).glob("v*")
    drafter = load_file(version / "drafter" / "model.safetensors")
    return load_file(version / "model.safetensors") | {f"drafter.{name}": t for name, t in drafter.items()}


def of_step(worker: TrainerWorker) -> dict[str, Any]:
    return worker.step(BATCH) | {"step_s": 0}


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_a_drafter_is_published_stored_and_saved_with_the_policy(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess, wire_dtype: str | None
) -> None:
    worker = trained(with_config(spec, wire_dtype=wire_dtype), controller, steps=1)
    sent = dict(controller.received)
    dtype = torch.bfloat16 if wire_dtype else torch.float32
    assert equal(sent, {name: tensor.to(dtype) for name, tensor in everything(worker).items()})
    assert equal(stored(spec), sent)
    first = load_file(tmp_path / "head" / "model.safetensors")
    assert drafter_of(sent).keys() == first.keys()
    assert not torch.equal(drafter_of(sent)["fc.weight"], first["fc.weight"].to(dtype)), "it has learned"
    policy = saved(worker, tmp_path / "saved")
    assert policy.keys() == load_file(Path(spec.model) / "model.safetensors").keys()
    head = read_head(tmp_path / "saved" / "drafter").state_dict()
    assert equal({name: tensor.to(dtype) for name, tensor in head.items()}, drafter_of(sent))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"wire_dtype": "bfloat16"}, {"lora": {"publish": "merged", "rank": 2}}]
)
def test_a_restarted_trainer_drafts_and_learns_bit_for_bit_as_before(
    spec: TrainerSpec, controller: ControllerInProcess, changes: dict[str, Any]
) -> None:
    spec = with_config(spec, **changes)
    straight = trained(spec, controller, steps=2)
    resumed = started(spec, controller)
    assert equal(everything(resumed), everything(straight))
    assert [of_step(resumed), of_step(resumed)] == [of_step(straight), of_step(straight)]
    assert equal(everything(resumed), everything(straight))


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_multi_token_prediction_is_trained_published_and_restarted_as_a_part_of_the_model(
    mtp_spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess, wire_dtype: str | None
) -> None:
    spec = with_config(mtp_spec, wire_dtype=wire_dtype)
    straight = trained(spec, controller, steps=1)
    sent, dtype = dict(controller.received), torch.bfloat16 if wire_dtype else torch.float32
    first = load_file(Path(spec.model) / "model.safetensors")
    assert sent.keys() == first.keys()
    heads = {name for name in first if name.startswith("mtp.")}
    assert not [name for name in heads if torch.equal(sent[name], first[name].to(dtype))], "it has learned"
    assert all(sent[name].dtype == dtype for name in heads)
    (version,) = Path(spec.store_dir).glob("v*")
    assert equal(load_file(version / "model.safetensors"), sent) and not (version / "drafter").exists()
    resumed = started(spec, controller)
    assert equal(everything(resumed), everything(straight))
    assert of_step(resumed) == of_step(straight)
    assert equal(everything(resumed), everything(straight))
    assert equal(saved(resumed, tmp_path / "saved"), everything(resumed))
    resumed.load_version(1)
    assert equal({name: tensor.to(sent[name].dtype) for name, tensor in everything(resumed).items()}, sent)


@pytest.mark.slow
def test_a_rollback_takes_the_drafter_along(spec: TrainerSpec, controller: ControllerInProcess) -> None:
    worker = trained(spec, controller, steps=1)
    before = everything(worker)
    go_on(worker, 1)
    assert not equal(everything(worker), before)
    worker.load_version(1)
    assert equal(everything(worker), before)


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("first", [True, False], ids=["removed", "added"])
def test_the_policy_resumes_exactly_when_a_drafter_comes_or_goes(
    spec: TrainerSpec,
    controller: ControllerInProcess,
    wire_dtype: str | None,
    first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = with_config(spec, wire_dtype=wire_dtype)
    without = with_config(spec, drafter=None)
    before, after = (spec, without) if first else (without, spec)
    straight = trained(before, controller, steps=2)
    with caplog.at_level("INFO", "ray.serve"):
        resumed = started(after, controller)
    assert "the trainer resumes from version 2, step 2" in lines(caplog)
    mine, theirs = of_step(resumed), of_step(straight)
    own = {name for name in mine if not name.startswith("drafter")}
    assert {name: mine[name] for name in own} == {name: theirs[name] for name in own}
    trained_on, expected = everything(resumed), everything(straight)
    policy = [name for name in expected if not name.startswith("drafter.")]
    assert all(torch.equal(trained_on[name], expected[name]) for name in policy)


@pytest.mark.slow
def test_another_head_than_the_stored_version_has_is_refused(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    trained(spec, controller, steps=1)
    write_new_head(Path(spec.model), tmp_path / "other", draft_vocabulary=16)
    with pytest.raises(ValueError, match=r"v0*1: the drafter's 'd2t': expected shape \[16\], got none$"):
        started(with_config(spec, drafter={"model": str(tmp_path / "other")}), controller)
