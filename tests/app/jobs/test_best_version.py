import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.jobs import metrics
from app.jobs.environments.environment import HELD_OUT
from tests.app.http.fake_status import report
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
    """Its trainer saves, and it takes a directory as its next version. Answers get worse after version 6."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[str] = []
        self.published: list[dict[str, Any]] = []
        self.full = False

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        made = super().completion(request)
        if self.version > 6:
            for choice in made["choices"]:
                choice["message"]["content"] = choice["message"]["content"][1:]
        return made

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path not in ("/train/save", "/fleet/publish"):
            return await super().answer(request)
        body = json.loads(request.content)
        match request.url.path:
            case "/train/save" if self.full:
                error = {"type": "invalid_request", "message": "the disk is full"}
                return httpx.Response(400, json={"error": error})
            case "/train/save":
                self.saved.append(body["path"])
                return httpx.Response(200, json={"path": body["path"], "step": 1, "save_s": 0.1})
        self.published.append(body)
        return httpx.Response(200, json=asdict(report(9, 9, body["label"])))


BEST = ["--steps", "4", "--eval-every", "1", "--eval-problems", "2", "--eval-attempts", "2", "--publish-best"]


async def test_the_best_version_is_kept_and_published_at_the_end_with_its_reward(tmp_path: Path) -> None:
    fleet = KeepingFleet()
    await run_job(fleet, tmp_path / "m.jsonl", *BEST, "--keep-best", str(tmp_path / "best"))
    (kept,) = fleet.saved  # later versions are no better
    assert kept.startswith(str(tmp_path / "best" / "m-step-1-"))
    assert fleet.published == [{"path": kept, "label": "best of m: reward 1.500"}]


async def test_a_failed_save_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = KeepingFleet()
    fleet.full = True
    records = await run_job(fleet, tmp_path / "m.jsonl", *BEST, "--keep-best", str(tmp_path / "best"))
    assert len(records) == 4 and fleet.published == []
    said = capsys.readouterr().out
    assert "the best version could not be kept" in said
    assert "the fleet keeps the last version: the best one is not known, or was not kept" in said


async def test_a_resumed_run_knows_which_version_was_best(tmp_path: Path) -> None:
    fleet = KeepingFleet()
    given = [*BEST, "--keep-best", str(tmp_path / "best")]
    await run_job(fleet, tmp_path / "m.jsonl", *given, "--steps", "2")
    fleet.published.clear()
    await run_job(fleet, tmp_path / "m.jsonl", *given, "--resume")
    assert len(fleet.saved) == 1
    assert [body["path"] for body in fleet.published] == fleet.saved


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
