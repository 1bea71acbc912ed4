"""Trackers get what a step reports, and a run does not wait for them."""

import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from app.jobs.metrics import Configuration, Row
from app.jobs.options import Tracking
from app.jobs.trackers import Trackers, open_trackers

CONFIGURATION = Configuration(options={"steps": 3}, model="tiny", version=4, began=1e9, run_id="1a2b")


@pytest.mark.parametrize("wanted", list(Tracking))
def test_a_package_that_is_missing_is_named(wanted: Tracking, tmp_path: Path) -> None:
    if importlib.util.find_spec(wanted.value) is not None:
        pytest.skip(f"{wanted.value} is installed")
    with pytest.raises(ValueError, match=f"--log {wanted.value} needs the package {wanted.value}"):
        open_trackers([wanted], tmp_path / "m.jsonl", CONFIGURATION)


def test_a_tracker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "def init(**options):\n    raise RuntimeError('No API key configured')\n"
    (tmp_path / "wandb.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"^--log wandb raised RuntimeError: No API key configured \(wandb"):
        open_trackers([Tracking.WANDB], tmp_path / "m.jsonl", CONFIGURATION)
    del sys.modules["wandb"]


FAKE_WANDB = """
logged = []
def init(**given):
    logged.append(given)
    return Run()
class Run:
    def log(self, values, step):
        logged.append((step, values))
    def finish(self):
        pass
def Table(columns, data):
    return [dict(zip(columns, row)) for row in data]
"""


@pytest.mark.parametrize("wanted", [Tracking.WANDB, Tracking.TRACKIO])
def test_a_tracker_gets_the_configuration_and_some_rollouts(
    wanted: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{wanted}.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, wanted, raising=False)
    (tracker,) = open_trackers([wanted], tmp_path / "run.jsonl", CONFIGURATION)
    row = {
        **{"problem": 5, "source": "", "reward": 1.0, "tokens": 2, "cut": False, "text": "8"},
        "weight_versions": [[[4, 0, 1], [5, 1, 2]]],
    }
    trackers = Trackers([tracker], print)
    trackers.log(1, {"reward": 0.5}, [row] * 20)
    trackers.close()
    begun, (step, values) = sys.modules[wanted].logged
    assert begun.get("id", begun["name"]) == "run-1a2b", "another run may have a record of this name"
    assert begun["config"]["options"] == {"steps": 3}
    assert step == 1 and values["reward"] == 0.5 and len(values["rollouts"]) == 16
    assert values["rollouts"][0]["versions"] == "4, 5" and values["rollouts"][0]["text"] == "8"
    del sys.modules[wanted]


class Service:
    """Keeps the steps that it is given; each waits until it is let on."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.steps: list[int] = []
        self.goes_on = threading.Event()
        self.problem = problem

    def log(self, step: int, values: Mapping[str, float], rollouts: Sequence[Row]) -> None:
        self.goes_on.wait(20)
        if self.problem is not None:
            raise self.problem
        self.steps.append(step)

    def close(self) -> None:
        if self.problem is not None:
            raise self.problem


def test_a_tracker_that_fails_is_spoken_of_once_and_again_at_the_end() -> None:
    said: list[str] = []
    broken, good = Service(ConnectionError("the service is away")), Service()
    trackers = Trackers([broken, good], said.append)
    for step in (1, 2, 3):
        trackers.log(step, {"reward": 0.5}, [])
    for each in (broken, good):
        each.goes_on.set()
    trackers.close()
    assert good.steps == [1, 2, 3]
    assert said == [
        "steps from 1 on are in the record only: Service: the service is away",
        "Service may lack the last steps, which the record has: the service is away",
    ]


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end() -> None:
    said: list[str] = []
    slow = Service()
    trackers = Trackers([slow], said.append, finish_s=0.05)
    trackers.log(1, {}, [])
    trackers.close()
    assert said == ["Service may lack the last steps, which the record has: it does not finish"]
    slow.goes_on.set()
