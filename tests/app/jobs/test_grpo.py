"""The loop against a fleet that is a function."""

import asyncio
import json
import math
import time
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import JsonValue

from app.client.completions import Answer
from app.client.connection import FleetError
from app.client.program_options import parse
from app.jobs.environments.environment import Problem
from app.jobs.grpo import configured, prepared
from app.jobs.metrics import Configuration, append
from app.jobs.options import JobOptions
from app.jobs.policy import Policy
from app.jobs.run import Run
from app.jobs.run_display import Display
from app.jobs.task_groups import all_of, run_beside
from tests.app.fake_answers import chat_choice
from tests.app.http.fake_trainer import STATUS, adapter_report
from tests.app.jobs.fake_fleet import CountingTask, FakeFleet, run_job
from trainers.trajectory import VersionSpan


async def test_every_step_is_trained_published_and_recorded(tmp_path: Path) -> None:
    fleet = FakeFleet()
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3")
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.version for record in records] == [5, 6, 7]
    assert fleet.labels == ["1", "2", "3"]
    assert records[0].reward == 2.0 and records[0].groups_with_signal == 2
    assert all(record.staleness_max <= 2 for record in records)
    (batch, *_) = fleet.batches
    assert len(batch) == 6
    assert batch[0].weight_versions == (VersionSpan(version=4, start=0, end=1),)
    assert records[0].draft_acceptance is None


async def test_a_step_says_how_many_drafts_were_accepted(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.load = replace(fleet.load, drafted_tokens=80, accepted_tokens=20)
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert record.draft_acceptance == record.values()["draft_acceptance"] == 0.25


class AdaptingFleet(FakeFleet):
    """Its trainer trains the adapter `math`, which has no version until one is published."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.asked: set[str] = set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/train/status":
                current = {"step": self.steps, "doing": None, "last_round": None}
                status = asdict(STATUS) | current | {"adapter": "math", "adapter_version": self.version}
                return httpx.Response(200, json=status)
            case "/train/publish" if (label := json.loads(request.content)["label"]) == "start":
                self.version += 1
                self.labels.append(label)
                return httpx.Response(200, json=asdict(adapter_report(self.version, label)))
        return await super().answer(request)

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.add(request["model"])
        answer = super().completion(request)
        spans = [{"version": 0, "start": 0, "end": 1}]
        changes = {"adapter": f"math@{self.version}", "weight_versions": spans}
        return answer | {"choices": [choice | changes for choice in answer["choices"]]}


async def test_a_trainer_of_an_adapter_learns_from_the_adapters_own_answers(tmp_path: Path) -> None:
    fleet = AdaptingFleet()
    fleet.loses["publish"] = 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3", "--max-staleness", "0")
    assert fleet.asked == {"math"}
    assert fleet.labels == ["start", "1", "2", "3"]
    assert [record.version for record in records] == [2, 3, 4]
    assert all(record.staleness_max == 0 for record in records)
    versions = [{span.version for each in batch for span in each.weight_versions} for batch in fleet.batches]
    assert versions == [{1}, {2}, {3}], "of the adapter that sampled, not of the base"


async def test_a_step_without_a_finite_loss_is_no_restart_of_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.metrics = {"skipped": True}
    await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert "the trainer was restarted" not in capsys.readouterr().out


async def test_a_resumed_run_continues_after_its_last_step(tmp_path: Path) -> None:
    fleet = FakeFleet()
    await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", "--resume")
    assert [record.step for record in records] == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "m.rollouts.jsonl").read_text().splitlines()]
    assert len({row["problem"] for row in rows}) == 8, "two for each step, and none twice"
    with pytest.raises(ValueError, match="--seed was 0, and is 1 now"):
        await run_job(fleet, tmp_path / "m.jsonl", "--seed", "1", "--resume")


async def test_a_resumed_run_has_the_same_problems_and_says_what_else_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, prompts = tmp_path / "m.jsonl", tmp_path / "problems.jsonl"
    prompts.write_text("{}")
    asked = ("--steps", "1", "--prompts", str(prompts), "--reward", "mine:length", "--resume")

    def began(**options: JsonValue) -> None:
        digest = sha256(b"{}").hexdigest() if "prompts" in options else None
        append(
            path, Configuration(options=options, model="tiny", version=4, began=0.0, prompts_digest=digest)
        )

    began(task="chain_sum", prompts="/moved/problems.jsonl", reward="mine:exact", steps=7)
    await run_job(FakeFleet(), path, *asked)
    said = capsys.readouterr().out
    assert "--resume: --reward was 'mine:exact', and is 'mine:length' now\n" in said
    assert said.count("--resume: ") == 1
    prompts.write_text("{ }")
    began(task="chain_sum", prompts="/moved/problems.jsonl")
    with pytest.raises(ValueError, match=r"other problems: --prompts was '/moved/problems.jsonl', and is "):
        await run_job(FakeFleet(), path, *asked)
    began(prompts=str(prompts))
    with pytest.raises(
        ValueError, match=r"other problems: .*/problems.jsonl has changed. Begin a run of its"
    ):
        await run_job(FakeFleet(), path, *asked)
    began(prompts=None, task="spell_backward")
    with pytest.raises(
        ValueError, match=r"problems: --task was 'spell_backward', and is 'chain_sum' now; --"
    ):
        await run_job(FakeFleet(), path, *asked)


async def test_a_resumed_run_is_the_same_for_trackers(tmp_path: Path) -> None:
    path, fleet, task, of_one_run = tmp_path / "m.jsonl", FakeFleet(), CountingTask(), set()
    async with fleet.client() as client:
        for given in ([], ["--resume"], ["--resume"]):
            options = parse(JobOptions, given)
            run = await prepared(client, options, (task, task), path, Display(), time.monotonic())
            made = configured(run)
            append(path, made)
            of_one_run.add(made.run_id)
    assert len(of_one_run) == 1 and "" not in of_one_run


async def test_a_run_that_is_resumed_with_another_fleet_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run_job(FakeFleet(), tmp_path / "m.jsonl", "--steps", "2")
    await run_job(FakeFleet(), tmp_path / "m.jsonl", "--steps", "3", "--resume")
    assert (
        "the run's last step made version 6, and the fleet serves 4: it is another" in capsys.readouterr().out
    )


async def test_each_step_is_on_the_fleets_page_and_a_fleet_that_refuses_it_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    await run_job(fleet, tmp_path / "grpo-1.jsonl", "--steps", "2")
    first, second = fleet.reports
    assert (first["run"], first["step"], second["step"]) == ("grpo-1", 1, 2)
    assert (first["values"]["reward"], first["values"]["trainer/loss"]) == (2.0, 0.5)
    assert first["rollouts"][0] == {"text": "xxx", "reward": 3.0, "versions": [[4, 3]]}
    fleet.refuses_reports = True
    assert len(await run_job(fleet, tmp_path / "grpo-2.jsonl", "--steps", "1")) == 1
    assert "step 1 is not on the fleet's page: " in capsys.readouterr().out


async def test_a_step_does_not_wait_for_the_page_of_the_one_before(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.reports_after = 2
    async with asyncio.timeout(20):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert [each["step"] for each in fleet.reports] == [1, 2]


async def test_a_step_does_not_wait_for_the_trainers_proof(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.beside = "score"
    async with asyncio.timeout(20):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")


async def test_an_aborted_round_is_tried_again(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.abort_next = True
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert records[0].version == 5


async def test_groups_without_a_difference_are_counted_but_not_trained_on(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.same = True
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert fleet.batches == [] and fleet.labels == []
    assert record.groups_with_signal == 0 and record.version == 4


class AnswersByProblem(FakeFleet):
    """All answers to a problem are equal, and other problems have others."""

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        length = 1 + int(request["messages"][0]["content"])
        choice = chat_choice([7] * length, text="x" * length, version=self.version)
        return {"choices": [choice] * request["n"]}


async def test_equal_rewards_that_are_compared_over_the_batch_are_not_left_out(tmp_path: Path) -> None:
    fleet = AnswersByProblem()
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1", "--advantage", "reinforce_pp")
    assert len(fleet.batches[0]) == 6
    assert record.left_out["with equal rewards"] == 0


async def test_a_problem_that_the_fleet_refuses_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.deadly = {"0"}
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert record.groups == 2 and fleet.ends() == {"unanswered": 1, "consumed": 2}
    assert "problem 0 is left out: 2 replicas were lost under this request" in capsys.readouterr().out


async def test_a_reward_that_fails_ends_the_run_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    fleet = FakeFleet()

    class Failing(CountingTask):
        async def score(self, problem: Problem, answer: Answer) -> float:
            if len(fleet.batches) == 1:
                raise ValueError("the reward must return a finite number, got nan")
            return await super().score(problem, answer)

    with pytest.raises(ValueError, match="must return a finite number, got nan"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3", task=Failing())
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3", "--resume")
    assert [record.step for record in records] == [1, 2, 3]
    assert fleet.ends() == {"consumed": 6}, "three steps of two problems"


async def test_a_batch_that_the_trainer_refuses_is_left_out_and_a_second_one_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.refused_batches = 1
    first, second = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert (first.version, dict(first.trainer), second.version) == (4, {}, 5)
    assert "nothing is learned in step 1, and its answers are left out: " in capsys.readouterr().out
    fleet.refused_batches = 3
    with pytest.raises(FleetError, match="a log-probability is infinite"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "5", "--resume")
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "5", "--resume")
    assert [dict(record.trainer) == {} for record in records] == [True, False, True, True, False]


@pytest.mark.slow
async def test_a_run_of_which_no_problem_is_answered_ends(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.deadly = {str(number) for number in range(1000)}
    with pytest.raises(ValueError, match="100 problems in a row were not answered: 2 replicas were lost"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")


async def test_a_fault_of_ours_keeps_its_place() -> None:
    async def faulty() -> None:
        await asyncio.sleep(0)
        raise TypeError("a fault")

    with pytest.raises(TypeError) as raised:
        await run_beside(asyncio.sleep(600), [faulty()])
    assert "faulty" in [entry.name for entry in raised.traceback]


async def test_a_group_without_signal_is_replaced_and_counts_in_the_reward(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.same = True
    completion = fleet.completion

    def sometimes(request: dict[str, Any]) -> dict[str, Any]:
        fleet.same = int(request["messages"][0]["content"]) % 2 == 0
        return completion(request)

    fleet.completion = sometimes  # type: ignore[method-assign]
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1", "--dynamic-sampling")
    assert record.groups == 2 == record.groups_with_signal
    assert record.groups_filtered >= 1 and record.reward == 2.0
    assert len(fleet.batches[0]) == 6


@pytest.mark.slow
async def test_a_task_without_any_signal_ends_dynamic_sampling_with_a_sentence(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.same = True
    with pytest.raises(ValueError, match="--dynamic-sampling left out 100 groups for one step"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1", "--dynamic-sampling")


async def test_length_penalties_change_the_advantage_and_not_the_reward(tmp_path: Path) -> None:
    fleet = FakeFleet()
    given = ["--steps", "1", "--max-tokens", "3", "--overlong-buffer", "2", "--advantage", "dr_grpo"]
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", *given)
    assert record.reward == 2.0
    # rewards 1, 2, 3 and penalties 0, -0.5, -1
    assert [each.advantage for each in fleet.batches[0][:3]] == [-0.5, 0.0, 0.5]


async def test_a_step_has_figures_of_all_its_rollouts_which_are_kept(tmp_path: Path) -> None:
    fleet = FakeFleet()
    completion = fleet.completion

    def cut(request: dict[str, Any]) -> dict[str, Any]:
        answer = completion(request)
        for choice in answer["choices"]:
            choice["finish_reason"] = "length" if len(choice["token_ids"]) == 3 else "stop"
        return answer

    fleet.completion = cut  # type: ignore[method-assign]
    before = time.time()
    first, second = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2", "--eval-every", "2")
    assert first.reward == 2.0 and first.reward_std == pytest.approx(math.sqrt(2 / 3))
    assert first.reward_by_source == {"even": 2.0, "odd": 2.0}
    assert first.cut_fraction == pytest.approx(1 / 3) and first.turns_mean == 1.0
    assert (first.answer_tokens_mean, first.answer_tokens_max) == (2.0, 3)
    assert before < first.ended < second.ended
    assert second.evaluation_s > 0.0 == first.evaluation_s and first.train_s > 0.0
    made = second.evaluation
    assert (
        made is not None and made.reward_by_source == {"even": 2.5, "odd": 2.5} and made.cut_fraction == 0.25
    )
    rows = [json.loads(line) for line in (tmp_path / "m.rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 6 + [2] * 6
    assert [(row["reward"], row["cut"], row["text"]) for row in rows[:3]] == [
        (1.0, False, "x"),
        (2.0, False, "xx"),
        (3.0, True, "xxx"),
    ]
    assert rows[2]["weight_versions"] == [[[4, 0, 3]]] and rows[0]["source"] == "even"


async def test_a_runs_own_settings_come_with_each_batch(tmp_path: Path) -> None:
    fleet = FakeFleet()
    await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    own = ["--learning-rate", "0.5", "--loss", "dapo", "--loss-settings", '{"clip_low": 0.1}']
    await run_job(fleet, tmp_path / "n.jsonl", "--steps", "1", *own)
    dapo = {"name": "dapo", "clip_low": 0.1}
    deployed, given = fleet.settings
    assert deployed is None
    assert json.loads(given or "") == {"learning_rate": 0.5, "loss": {**dapo, "clip_high": 0.28}}


def test_the_state_says_what_is_in_flight_and_ready(tmp_path: Path) -> None:
    options = parse(JobOptions, [])
    policy = Policy(client=FakeFleet().client(), model="m", max_tokens=1)
    environment = CountingTask()
    run = Run(options, environment, environment, policy, tmp_path / "m", "r", 4, Display(), in_flight=6)
    shown = run.status().line()
    assert "step 1 of 20: waiting for answers; 0 of 12 groups ready, 6 prompts in flight (48 rollo" in shown
    assert "version 4" in shown


async def test_groups_that_are_settled_during_a_call_share_the_next_one(tmp_path: Path) -> None:
    settled: list[list[str]] = []

    class Noting(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/rollouts/settle":
                settled.append([each["group"] for each in json.loads(request.content)["groups"]])
            return await super().answer(request)

    fleet, task = Noting(), CountingTask()
    async with fleet.client() as client:
        options = parse(JobOptions, ["--groups-in-flight", "9"])
        run = await prepared(client, options, (task, task), tmp_path / "m.jsonl", Display(), 0.0)
        numbers = [await run.begin_problem() for _ in range(9)]
        await all_of(run.settle(number, (), "left out") for number in numbers)
    assert [len(groups) for groups in settled] == [1, 8] and len(
        {each for groups in settled for each in groups}
    ) == 9
    assert fleet.ends() == {"left out": 9}


async def test_where_steps_wait_for_the_trainer_no_group_begins_earlier_than_it_must(tmp_path: Path) -> None:
    class Slow(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/train/publish":
                for _ in range(2000):  # all groups that may begin are ready before
                    await asyncio.sleep(0)
            return await super().answer(request)

    given = ["--steps", "6", "--groups-per-step", "4", "--groups-in-flight", "4"]
    records = await run_job(Slow(), tmp_path / "m.jsonl", *given)
    assert [record.staleness_max for record in records[3:]] == [1, 1, 1]
