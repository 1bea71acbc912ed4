"""The loop against a fleet that is a function."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.jobs import metrics
from app.jobs.groups import GroupQueue
from app.jobs.grpo import Run, learn, produce, require_fleet, resume, together
from app.jobs.options import parse
from app.jobs.rollouts import FleetError
from app.jobs.tasks import Problem


class CountingTask:
    """The longer the answer, the better."""

    def problem(self, number: int) -> Problem:
        return Problem(messages=[{"role": "user", "content": str(number)}], entry={})

    def score(self, problem: Problem, answer: str) -> float:
        return float(len(answer))


class FakeFleet:
    """Answers the routes that the job uses; every publish is a version."""

    def __init__(self) -> None:
        self.version = 4
        self.batches: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self.abort_next = False
        self.same = False

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://fleet")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        match request.url.path:
            case "/health":
                return httpx.Response(200, json={"weight_version": self.version})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}]})
            case "/train/status":
                return httpx.Response(200, json={"step": 0})
            case "/v1/chat/completions":
                return httpx.Response(200, json=self.completion(json.loads(request.content)))
            case "/train/step":
                self.batches.append(json.loads(request.content))
                return httpx.Response(200, json={"loss": 0.5})
            case "/train/publish":
                if self.abort_next:
                    self.abort_next = False
                    return httpx.Response(409, json={"error": {"type": "round_aborted", "message": "x"}})
                self.version += 1
                self.labels.append(json.loads(request.content)["label"])
                return httpx.Response(200, json={"version": self.version})
        return httpx.Response(404)

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        lengths = [2 if self.same else 1 + n for n in range(request["n"])]
        choices = [
            {
                "message": {"content": "x" * length},
                "token_ids": [7] * length,
                "logprobs": {"content": [{"logprob": -1.0}] * length},
                "weight_versions": [{"version": self.version, "start": 0, "end": length}],
            }
            for length in lengths
        ]
        return {"prompt_token_ids": [1, 2], "choices": choices}


async def run_job(
    fleet: FakeFleet, path: Path, *arguments: str, resuming: bool = False
) -> list[dict[str, Any]]:
    options = parse(
        ["--groups-per-step", "2", "--answers-per-group", "3", "--metrics", str(path), *arguments]
    )
    async with fleet.client() as client:
        model, version = await require_fleet(client, "http://fleet")
        queue = GroupQueue(capacity=2, max_staleness=options.max_staleness)
        run = Run(options, CountingTask(), client, model, path, queue, version)
        if resuming:
            resume(run, metrics.rows(path))
        await asyncio.wait_for(together(learn(run), [produce(run) for _ in range(2)]), 20)
    return metrics.rows(path)


async def test_every_step_is_trained_published_and_recorded(tmp_path: Path) -> None:
    fleet = FakeFleet()
    rows = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["version"] for row in rows] == [5, 6, 7]
    assert fleet.labels == ["step 1", "step 2", "step 3"]
    assert rows[0]["reward"] == 2.0 and rows[0]["groups_with_signal"] == 2
    assert all(row["staleness_max"] <= 2 for row in rows)
    (batch, *_) = fleet.batches
    assert len(batch["trajectories"]) == 6
    assert batch["trajectories"][0]["weight_versions"] == [{"version": 4, "start": 0, "end": 1}]


async def test_a_resumed_run_goes_on_after_its_last_step(tmp_path: Path) -> None:
    fleet = FakeFleet()
    first = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    rows = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", resuming=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["next_problem"] > first[-1]["next_problem"]
    with pytest.raises(ValueError, match="has --seed 0, got 1"):
        await run_job(fleet, tmp_path / "m.jsonl", "--seed", "1", resuming=True)


async def test_an_aborted_round_is_tried_again(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.abort_next = True
    rows = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert rows[0]["version"] == 5


async def test_groups_without_a_difference_are_counted_but_not_trained_on(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.same = True
    (row,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert fleet.batches == [] and fleet.labels == []
    assert row["groups_with_signal"] == 0 and row["version"] == 4


async def test_a_producer_that_fails_ends_the_run(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.completion = lambda request: {"choices": []}  # type: ignore[method-assign]
    with pytest.raises(FleetError, match="no prompt_token_ids"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")


async def test_a_missing_fleet_is_told_in_a_sentence() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://fleet") as client:
        with pytest.raises(FleetError, match="no Slipstream fleet answers at http://fleet"):
            await require_fleet(client, "http://fleet")


def test_half_a_line_at_the_end_is_what_a_killed_job_leaves(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert metrics.rows(path) == [{"step": 1}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(ValueError, match=":1 must be JSON"):
        metrics.rows(path)


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        parse(["--answers-per-group", "1"])
    with pytest.raises(ValueError, match="go together"):
        parse(["--reward", "a:b"]).load_task()
    assert replace(parse([]), steps=1).stop == ["\n"]
