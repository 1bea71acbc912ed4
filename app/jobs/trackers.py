"""Where metrics go beside the run's record, each in a package of its own that need not be installed."""

import importlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from app.jobs.own_code import blamed

PROJECT = "slipstream"


class Tracking(StrEnum):
    """Trackers by name."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Tracker(Protocol):
    """A place for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""

    def close(self) -> None:
        """No more will come."""


class TensorBoard:
    """Event files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """wandb, or trackio, which has its interface."""

    def __init__(self, package: str, name: str) -> None:
        module = _module(package, package)
        with blamed(f"--log {package}"):
            self._run = module.init(project=PROJECT, name=name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(wanted: Sequence[Tracking], record: Path) -> list[Tracker]:
    """Trackers of the run with this record; they have its name.

    Raises:
        ValueError: a package is not installed, or its service refuses.
    """
    made: list[Tracker] = []
    for each in dict.fromkeys(wanted):
        if each is Tracking.TENSORBOARD:
            made.append(TensorBoard(record.with_suffix("")))
        else:
            made.append(Wandb(each.value, record.stem))
    return made


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--log {package} needs the package {package}, which is not installed here: {error}"
        ) from error
