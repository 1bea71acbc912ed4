"""A trainer's only rank, which trains an adapter, in the test's own process."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from deployments.protocol.responses import AdapterReport
from deployments.trainer.adapter_worker import AdapterWorker
from deployments.trainer.spec import TrainerSpec, state_directory
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import go_on

TENSORS = "adapter_model.safetensors"


def started(spec: TrainerSpec, controller: ControllerInProcess) -> AdapterWorker:
    worker = AdapterWorker(spec, 0, controller)  # type: ignore[arg-type]
    worker.load(("127.0.0.1", 0))
    return worker


def published(worker: AdapterWorker, label: str | None = None) -> AdapterReport:
    report = worker.publish(label)
    assert report is not None, "rank 0 has the report"
    return report


def trained(spec: TrainerSpec, controller: ControllerInProcess, steps: int = 2) -> AdapterWorker:
    worker = started(spec, controller)
    go_on(worker, steps)
    return worker


def saved(worker: AdapterWorker, directory: Path) -> dict[str, torch.Tensor]:
    worker.save(str(directory))
    return load_file(directory / TENSORS)


def live_files(controller: ControllerInProcess) -> list[Path]:
    """The fleet's copies of the live versions, oldest first."""
    return [Path(each.path) for each in controller.ask("adapters") if each.state == "live"]


def checkpoints(spec: TrainerSpec) -> list[Path]:
    return sorted(state_directory(spec.store_dir).glob("lora-*/*step-*"))
