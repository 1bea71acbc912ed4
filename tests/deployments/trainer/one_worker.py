"""A trainer's only rank, in the test's own process, with a tiny model and the real controller."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.protocol.publishing import RoundReport
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerRank, TrainerWorker
from tests.deployments.controller_in_process import CONTROLLER_THREAD, ControllerInProcess
from tests.deployments.trainer.trainer_specs import trainer_spec
from tests.tiny_models import save_tiny_llama
from trainers.settings import OptimizerConfig, TrainerConfig

BATCH: list[Any] = [
    {"prompt_token_ids": [5, 6], "token_ids": [7, 1], "logprobs": [-1.0, -1.0], "advantage": 1.0},
    {"prompt_token_ids": [5, 6], "token_ids": [9], "logprobs": [-2.0], "advantage": -1.0},
]


def small_spec(tmp_path: Path) -> TrainerSpec:
    return trainer_spec(
        save_tiny_llama(tmp_path / "model", seed=0, tied=True),
        tmp_path / "state" / "store",
        chunk_bytes=1 << 18,
        config=TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4), checkpoint_every=1
        ),
    )


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


def saved(worker: TrainerWorker, directory: Path) -> dict[str, torch.Tensor]:
    worker.save(str(directory))
    return load_file(directory / "model.safetensors")


def published(worker: TrainerWorker, label: str | None = None) -> RoundReport:
    report = worker.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the trainer has logged, not its controller."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "ray.serve" and record.threadName != CONTROLLER_THREAD
    ]
