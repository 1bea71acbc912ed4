import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.jobs import metrics
from app.jobs.environments.environment import HELD_OUT
from tests.app.fake_answers import refusal
from tests.app.jobs.fake_fleet import FakeFleet, run_job
from tests.app.jobs.test_lost_answers import Killed

pytestmark = pytest.mark.slow  # whole runs


async def test_an_evaluation_is_of_the_served_version_and_in_the_record(tmp_path: Path) -> None:
    given = ["--steps", "3", "--eval-every", "2", "--eval-problems", "2", "--eval-attempts", "2"]
    seen: list[str] = []
    records = await run_job(FakeFleet(), tmp_path / "m.jsonl", *given, seen=seen)
    made = [record.evaluation for record in records]
    assert made[0] is None
    assert [each.version for each in made[1:] if each is not None] == [6, 7]
    assert all(each.reward == 1.5 and each.problems == 2 for each in made[1:] if each is not None)
    assert [each.split(":")[0] for each in seen] == ["step 2 of 3"] * 2 + ["step 3 of 3"] * 2
    assert [each.split()[-1] for each in seen] == ["True"] * 2 + ["False"] * 2, (
        "no step is left to sample for"
    )


async def test_an_evaluation_asks_each_held_out_problem_once(tmp_path: Path) -> None:
    records = await run_job(
        FakeFleet(), tmp_path / "m.jsonl", "--steps", "1", "--eval-every", "1", held_out=3
    )
    assert [each.evaluation.problems for each in records if each.evaluation is not None] == [3]


async def test_an_unanswered_evaluation_is_reported_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.deadly = {str(HELD_OUT)}
    given = ["--steps", "2", "--eval-every", "1", "--eval-problems", "1"]
    records = await run_job(fleet, tmp_path / "m.jsonl", *given)
    assert [record.evaluation for record in records] == [None, None]
    assert "no evaluation after step 1: none of 1 held-out problems was answered" in capsys.readouterr().out


class KeepingFleet(FakeFleet):
    """Its trainer saves. Answers get worse after version 6."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[str] = []
        self.full = False

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        made = super().completion(request)
        if self.version > 6:
            for choice in made["choices"]:
                choice["message"]["content"] = choice["message"]["content"][1:]
        return made

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/train/save":
            return await super().answer(request)
        if self.full:
            return refusal(400, "invalid_request", "the disk is full")
        self.saved.append(json.loads(request.content)["path"])
        return httpx.Response(200, json={"path": self.saved[-1], "step": 1, "save_s": 0.1})


BEST = ["--steps", "4", "--eval-every", "1", "--eval-problems", "2", "--eval-attempts", "2"]


async def test_the_best_version_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = KeepingFleet()
    await run_job(fleet, tmp_path / "m.jsonl", *BEST, "--keep-best", str(tmp_path / "best"))
    (kept,) = fleet.saved  # later versions are no better
    assert kept.startswith(str(tmp_path / "best" / "m-step-1-"))
    assert f"`slipstream publish {kept}`" in capsys.readouterr().out


async def test_a_failed_save_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = KeepingFleet()
    fleet.full = True
    records = await run_job(fleet, tmp_path / "m.jsonl", *BEST, "--keep-best", str(tmp_path / "best"))
    assert len(records) == 4
    assert "the best version could not be kept" in capsys.readouterr().out


async def test_a_resumed_run_knows_which_version_was_best(tmp_path: Path) -> None:
    fleet = KeepingFleet()
    given = [*BEST, "--keep-best", str(tmp_path / "best")]
    await run_job(fleet, tmp_path / "m.jsonl", *given, "--steps", "2")
    await run_job(fleet, tmp_path / "m.jsonl", *given, "--resume")
    assert len(fleet.saved) == 1


class KillingFleet(KeepingFleet):
    """The job does not live to see its second evaluation."""

    kills = True

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.kills and request.headers.get("x-min-weight-version") == "6":
            self.kills = False
            raise Killed
        return await super().answer(request)


@pytest.mark.parametrize("steps", ["2", "3"])
async def test_a_job_that_was_killed_in_an_evaluation_makes_it_after_the_restart(
    steps: str, tmp_path: Path
) -> None:
    fleet = KillingFleet()
    given = [*BEST, "--keep-best", str(tmp_path / "best"), "--steps", steps]
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", *given)
    assert [record.step for record in metrics.records(tmp_path / "m.jsonl")] == [1]
    records = await run_job(fleet, tmp_path / "m.jsonl", *given, "--resume")
    evaluated = [record.evaluation.version for record in records if record.evaluation is not None]
    assert evaluated == list(range(5, 5 + int(steps)))
    assert len(fleet.batches) == int(steps), "the step itself is not made again"
