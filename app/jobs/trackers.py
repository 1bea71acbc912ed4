"""Trackers: tensorboard, wandb, trackio. A run does not wait for them."""

import importlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from app.jobs.metrics import Configuration, Row
from app.jobs.options import Tracking
from app.jobs.user_code import blamed

PROJECT = "slipstream"
FINISH_S = 30.0


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float], rollouts: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, directory: Path, configuration: Configuration) -> None:
        self._writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(directory))
        shown = json.dumps(asdict(configuration), indent=2)
        self._writer.add_text("configuration", f"```json\n{shown}\n```")

    def log(self, step: int, values: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if rollouts:
            lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in _table(rollouts)]
            self._writer.add_text("rollouts", "\n".join(lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """wandb, or trackio with the same interface."""

    def __init__(self, package: str, name: str, configuration: Configuration) -> None:
        self._module = module = _module(package, package)
        known_as = f"{name}-{configuration.run_id}"  # other runs may have a record of this name
        own = {"id": known_as, "name": name} if package == "wandb" else {"name": known_as}
        with blamed(f"--log {package}"):
            self._run = module.init(project=PROJECT, config=asdict(configuration), resume="allow", **own)

    def log(self, step: int, values: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        logged: dict[str, Any] = dict(values)
        if rollouts:
            logged["rollouts"] = self._module.Table(columns=list(COLUMNS), data=_table(rollouts))
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._run.finish()


COLUMNS = ("problem", "source", "reward", "tokens", "cut", "versions", "text")
SHOWN_ROLLOUTS = 16


def _table(rollouts: Sequence[Row]) -> list[list[Any]]:
    made = []
    for row in rollouts:
        versions = sorted({span[0] for spans in row["weight_versions"] for span in spans})
        cells = {**row, "versions": ", ".join(map(str, versions))}
        made.append([cells[name] for name in COLUMNS])
    return made


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def open_trackers(wanted: Sequence[Tracking], record: Path, configuration: Configuration) -> list[Tracker]:
    return [
        TensorBoard(record.with_suffix(""), configuration)
        if each is Tracking.TENSORBOARD
        else Wandb(each.value, record.stem, configuration)
        for each in dict.fromkeys(wanted)
    ]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--log {package} needs the package {package}, which is not installed here: {error}"
        ) from error


class Trackers:
    """One thread per tracker. `say`: reports a tracker that fails or hangs; `finish_s` bounds `close`."""

    def __init__(
        self, trackers: Sequence[Tracker], say: Callable[[str], None], finish_s: float = FINISH_S
    ) -> None:
        self._finish_s = finish_s
        self._say = say
        self._threads = [_Thread(tracker, say) for tracker in trackers]

    def log(self, step: int, values: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        for thread in self._threads:
            thread.steps.put((step, values, rollouts[:SHOWN_ROLLOUTS]))

    def close(self) -> None:
        ends = time.monotonic() + self._finish_s
        for thread in self._threads:
            thread.steps.put(None)
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                self._say(f"{thread.name} may lack the last steps, which the record has: it does not finish")


class _Thread(threading.Thread):
    def __init__(self, tracker: Tracker, say: Callable[[str], None]) -> None:
        super().__init__(name=type(tracker).__name__, daemon=True)  # does not delay the exit
        self.steps = queue.SimpleQueue[tuple[int, Mapping[str, float], Sequence[Row]] | None]()
        self._tracker, self._say = tracker, say
        self.start()

    def run(self) -> None:
        problem = ""  # said once until a step succeeds
        while (logged := self.steps.get()) is not None:
            try:
                self._tracker.log(*logged)
                problem = ""
            except Exception as error:  # a service may raise anything
                if problem != str(error):
                    problem = str(error)
                    self._say(f"steps from {logged[0]} on are in the record only: {self.name}: {problem}")
        try:
            self._tracker.close()
        except Exception as error:  # a service may raise anything
            self._say(f"{self.name} may lack the last steps, which the record has: {error}")
