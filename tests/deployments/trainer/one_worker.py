"""A trainer's only rank, in the test's own process, with a tiny model and the real controller."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.protocol.publishing import RoundReport
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerRank, TrainerWorker
from tests.deployments.controller_in_process import CONTROLLER_THREAD, ControllerInProcess
from tests.deployments.trainer.trainer_specs import trainer_spec, with_config
from tests.tiny_models import save_tiny_llama, save_tiny_mtp, save_tiny_vision_language
from trainers.eagle3 import write_new_head
from trainers.settings import OptimizerConfig, TrainerConfig

BATCH: list[Any] = [
    {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-1.0, -1.0], "advantage": 1.0},
    {"prompt_token_ids": [5, 6], "token_ids": [9], "logprobs": [-2.0], "advantage": -1.0},
]
MERGED = {"publish": "merged", "rank": 4, "alpha": 8.0}
ADAPTER = {"name": "math", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
Tensors = dict[str, torch.Tensor]


def small_spec(tmp_path: Path) -> TrainerSpec:
    return trainer_spec(
        save_tiny_llama(tmp_path / "model", seed=0, tied=True),
        tmp_path / "state" / "store",
        chunk_bytes=1 << 18,
        config=TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4), checkpoint_every=1
        ),
    )


def spec_of(tmp_path: Path, kind: str, **changes: Any) -> TrainerSpec:
    """`kind`: what is trained. All weights, an adapter, one that is merged, and with each a head that drafts,
    which is the model's own with "mtp", and has experts with "mtp of experts"."""
    spec = small_spec(tmp_path)
    if kind == "adapter":
        changes["lora"] = ADAPTER
    if "merged" in kind:
        changes["lora"] = MERGED
    if "drafter" in kind:
        if not (head := tmp_path / "head").exists():
            write_new_head(Path(spec.model), head)
        changes["drafter"] = {"model": str(head), "learning_rate": 1e-3}
    if "mtp" in kind:
        save = save_tiny_mtp if "experts" in kind else save_tiny_vision_language
        spec = replace(spec, model=str(save(tmp_path / "drafts", 0)))
        changes["drafter"] = {"learning_rate": 1e-3}
    return with_config(spec, **changes)


def started(spec: TrainerSpec, controller: ControllerInProcess) -> TrainerWorker:
    worker = TrainerWorker(spec, 0, controller)  # type: ignore[arg-type]
    worker.load(("127.0.0.1", 0))
    return worker


def go_on(worker: TrainerRank, steps: int) -> None:
    """Each step is published, stored and followed by a save of the state."""
    for _ in range(steps):
        worker.step(BATCH)
        worker.publish(None)
        worker.save_checkpoint()
        assert worker.flush(30.0)


def trained(spec: TrainerSpec, controller: ControllerInProcess, *, steps: int) -> TrainerWorker:
    worker = started(spec, controller)
    go_on(worker, steps)
    return worker


def of_step(worker: TrainerRank) -> dict[str, Any]:
    """The metrics of another step, but for its duration."""
    return worker.step(BATCH) | {"step_s": 0}


def everything(worker: TrainerWorker) -> Tensors:
    """All weights by the names under which they are published, not rounded."""
    return {name: tensor.clone() for name, tensor in worker._source(None)}


def files(directory: Path) -> Tensors:
    """The tensors of a checkpoint, a drafter's with the prefix of published names."""
    drafter, tensors = directory / "drafter" / "model.safetensors", load_file(directory / "model.safetensors")
    if drafter.exists():
        tensors |= {f"drafter.{name}": tensor for name, tensor in load_file(drafter).items()}
    return tensors


def stored(spec: TrainerSpec, version: int) -> Tensors:
    return files(Path(spec.store_dir) / f"v{version:08d}")


def saved(worker: TrainerWorker, directory: Path) -> Tensors:
    worker.save(str(directory))
    return files(directory)


def published(worker: TrainerWorker, label: str | None = None) -> RoundReport:
    report = worker.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the trainer has logged, not its controller."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "ray.serve" and record.threadName != CONTROLLER_THREAD
    ]
