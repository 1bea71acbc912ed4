import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.jobs.curve import reward_curve
from app.jobs.evaluation import Evaluation
from app.jobs.trackers import Tracking, open_trackers
from tests.app.jobs.test_metrics import record


@pytest.mark.parametrize("wanted", list(Tracking))
def test_a_package_that_is_missing_is_named(wanted: Tracking, tmp_path: Path) -> None:
    if importlib.util.find_spec(wanted.value) is not None:
        pytest.skip(f"{wanted.value} is installed")
    with pytest.raises(ValueError, match=f"--log {wanted.value} needs the package {wanted.value}"):
        open_trackers([wanted], tmp_path / "m.jsonl")


def test_a_tracker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "def init(**options):\n    raise RuntimeError('No API key configured')\n"
    (tmp_path / "wandb.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"^--log wandb raised RuntimeError: No API key configured \(wandb"):
        open_trackers([Tracking.WANDB], tmp_path / "m.jsonl")
    del sys.modules["wandb"]


def test_a_tracker_gets_every_number_of_a_step() -> None:
    evaluation = Evaluation(version=7, problems=2, reward=0.5, pass_at={1: 0.25})
    values = replace(record(1), evaluation=evaluation).values()
    assert values["reward"] == 0.5 and values["trainer/loss"] == 0.125
    assert values["evaluation/pass@1"] == 0.25 and "seed" not in values and "example" not in values


def test_the_curve_of_a_run_is_drawn_without_colours() -> None:
    pytest.importorskip("plotext")
    drawn = reward_curve([replace(record(step), reward=step / 4) for step in (1, 2, 3)])
    assert "0.75" in drawn and "0.25" in drawn and "\x1b" not in drawn
    assert reward_curve([record(1)]) == ""
