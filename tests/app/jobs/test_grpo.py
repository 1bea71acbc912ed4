"""The loop against a fleet that is a function."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client.connection import AsyncFleetClient, FleetError
from app.client.options import parse
from app.jobs import metrics
from app.jobs.attempts import Attempt
from app.jobs.environments.environment import Single
from app.jobs.groups import GroupQueue
from app.jobs.grpo import require_fleet, run_together
from app.jobs.learning import learn, publish_best, resume
from app.jobs.metrics import StepRecord
from app.jobs.options import Options
from app.jobs.progress import Progress
from app.jobs.rollouts import Policy, Sampling
from app.jobs.run import Run, produce
from app.jobs.tasks import Problem
from app.jobs.trackers import Tracker
from tests.app.http.fake_controller import report
from tests.app.http.fake_trainer import STATUS, adapter_report
from trainers.trajectory import Trajectory, VersionSpan
from trainers.trajectory_arrays import from_bytes


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
        self.batches: list[list[Trajectory]] = []
        self.labels: list[str] = []
        self.abort_next = False
        self.same = False
        self.steps = 3
        self.restarts = 0  # steps in which the trainer dies
        self.loses: dict[str, int] = {}  # step or publish -> answers that are lost after it was done
        self.deadly: set[str] = set()  # prompts that it refuses to answer
        self.cut_off_next: dict[str, Any] | None = None  # what is left of the next answer to be cut off

    def client(self) -> AsyncFleetClient:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://fleet")
        return AsyncFleetClient(http, patience_s=10.0, retry_pause_s=0.1, say=print)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        match request.url.path:
            case "/health":
                body = {"status": "ok", "serving": 1, "members": 1, "weight_version": self.version}
                return httpx.Response(200, json=body)
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}]})
            case "/train/status":
                done = [asdict(report(self.version, self.version, self.labels[-1]))] if self.labels else []
                current = {"step": self.steps, "doing": None, "last_round": done[0] if done else None}
                return httpx.Response(200, json=asdict(STATUS) | current)
            case "/v1/chat/completions":
                asked = json.loads(request.content)
                if asked["messages"][0]["content"] in self.deadly:
                    error = {"type": "deadly_request", "message": "2 replicas were lost under this request"}
                    return httpx.Response(422, json={"error": error})
                return httpx.Response(200, json=self.completion(asked))
            case "/train/step":
                if self.restarts:
                    self.restarts -= 1
                    self.steps = max(0, self.steps - 1)  # the trainer resumes from an older version
                    error = {"type": "fleet_unavailable", "message": "another one is being started"}
                    return httpx.Response(503, json={"error": error})
                self.batches.append(from_bytes(request.content))
                self.steps += 1
                self.lose("step", request)
                return httpx.Response(200, json={"loss": 0.5})
            case "/train/publish":
                if self.abort_next:
                    self.abort_next = False
                    return httpx.Response(409, json={"error": {"type": "round_aborted", "message": "x"}})
                self.version += 1
                self.labels.append(json.loads(request.content)["label"])
                self.lose("publish", request)
                return httpx.Response(200, json=asdict(report(self.version, self.version)))
        return httpx.Response(404)

    def lose(self, call: str, request: httpx.Request) -> None:
        if self.loses.get(call):
            self.loses[call] -= 1
            raise httpx.RemoteProtocolError("the server disconnected", request=request)

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        lengths = [2 if self.same else 1 + n for n in range(request["n"])]
        choices = [
            {
                "message": {"content": "x" * length},
                "token_ids": [7] * length,
                "logprobs": {"content": [{"logprob": -1.0}] * length},
                "weight_versions": [{"version": self.version, "start": 0, "end": length}],
                "finish_reason": "stop",
            }
            for length in lengths
        ]
        if self.cut_off_next is not None:
            choices[-1] |= {"finish_reason": "abort"} | self.cut_off_next
            self.cut_off_next = None
        return {"prompt_token_ids": [1, 2], "choices": choices}


@dataclass
class Watched:
    """An environment that says when it is asked."""

    environment: Single
    asked: Callable[[], None]

    async def attempts(self, number: int, count: int, policy: Policy) -> Sequence[Attempt]:
        self.asked()
        return await self.environment.attempts(number, count, policy)


async def run_job(
    fleet: FakeFleet,
    path: Path,
    *arguments: str,
    resuming: bool = False,
    trackers: Sequence[Tracker] = (),
    seen: list[str] | None = None,
) -> list[StepRecord]:
    """`seen`: what the run says of itself whenever it asks for a held-out problem, and whether it samples."""
    given = ["--groups-per-step", "2", "--answers-per-group", "3", "--metrics", str(path), *arguments]
    options = parse(Options, given)
    async with fleet.client() as client:
        model, version, is_adapter = await require_fleet(client)
        queue = GroupQueue(capacity=2, max_staleness=options.max_staleness)
        sampling = Sampling(answers=3, max_tokens=options.max_tokens)
        policy = Policy(client=client, model=model, sampling=sampling, is_adapter=is_adapter)
        environment = Single(CountingTask())
        run = Run(options, environment, environment, policy, path, queue, version)
        if seen is not None:
            run.held_out = Watched(environment, lambda: seen.append(f"{run.state()} {run.sampling.is_set()}"))
        if resuming:
            await resume(run, metrics.records(path))
        with Progress(steps=options.steps, done=run.step, state=run.state) as progress:
            run.say = progress.say
            others = [produce(run) for _ in range(2)]
            await asyncio.wait_for(run_together(learn(run, progress, trackers), others), 20)
            await publish_best(run)
    return metrics.records(path)


async def test_every_step_is_trained_published_and_recorded(tmp_path: Path) -> None:
    fleet = FakeFleet()
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3")
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.version for record in records] == [5, 6, 7]
    assert fleet.labels == ["step 1", "step 2", "step 3"]
    assert records[0].reward == 2.0 and records[0].groups_with_signal == 2
    assert all(record.staleness_max <= 2 for record in records)
    (batch, *_) = fleet.batches
    assert len(batch) == 6
    assert batch[0].weight_versions == (VersionSpan(version=4, start=0, end=1),)


class AdaptingFleet(FakeFleet):
    """Its trainer trains the adapter `math`, which has no version until one is published."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.asked: set[str] = set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/train/status":
                last = asdict(adapter_report(self.version, self.labels[-1])) if self.labels else None
                current = {"step": self.steps, "doing": None, "last_round": None, "last_adapter": last}
                status = asdict(STATUS) | current | {"adapter": "math", "adapter_version": self.version}
                return httpx.Response(200, json=status)
            case "/train/publish":
                self.version += 1
                self.labels.append(json.loads(request.content)["label"])
                self.lose("publish", request)
                return httpx.Response(200, json=asdict(adapter_report(self.version, self.labels[-1])))
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
    assert fleet.labels == ["start", "step 1", "step 2", "step 3"]
    assert [record.version for record in records] == [2, 3, 4]
    assert all(record.staleness_max == 0 for record in records)
    versions = [{span.version for each in batch for span in each.weight_versions} for batch in fleet.batches]
    assert versions == [{1}, {2}, {3}], "of the adapter that sampled, not of the base"


async def test_a_resumed_run_goes_on_after_its_last_step(tmp_path: Path) -> None:
    fleet = FakeFleet()
    first = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", resuming=True)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert records[2].next_problem > first[-1].next_problem
    with pytest.raises(ValueError, match="has --seed 0, got 1"):
        await run_job(fleet, tmp_path / "m.jsonl", "--seed", "1", resuming=True)


class BrokenTracker:
    """A service that is away."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the service is away")

    def close(self) -> None:
        """Nothing is open."""


async def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = await run_job(FakeFleet(), tmp_path / "m.jsonl", "--steps", "2", trackers=[BrokenTracker()])
    assert len(records) == 2
    assert "step 2 is in the record only: BrokenTracker: the service is away" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "left",
    [
        {"message": {"content": "a part with a reward of 30 "}},
        {"message": {"content": ""}, "token_ids": [], "logprobs": None, "weight_versions": []},
    ],
)
async def test_an_answer_that_was_cut_off_is_not_scored_and_does_not_end_the_run(
    left: dict[str, Any], tmp_path: Path
) -> None:
    fleet = FakeFleet()
    fleet.cut_off_next = left
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert record.reward == 2.0 and record.groups_with_signal == 2


async def test_a_problem_that_the_fleet_refuses_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.deadly = {"0"}
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert record.groups == 2 and record.next_problem == 3
    assert "problem 0 is left out: 2 replicas were lost under this request" in capsys.readouterr().out


async def test_a_producer_that_fails_ends_the_run(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.completion = lambda request: {"choices": []}  # type: ignore[method-assign]
    with pytest.raises(FleetError, match="no prompt_token_ids"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")


async def test_a_fault_of_ours_keeps_its_place() -> None:
    async def faulty() -> None:
        await asyncio.sleep(0)
        raise TypeError("a fault")

    with pytest.raises(TypeError) as raised:
        await run_together(asyncio.sleep(600), [faulty()])
    assert "faulty" in [entry.name for entry in raised.traceback]


async def test_a_missing_fleet_is_named_with_what_to_do() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    http = httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://fleet")
    async with AsyncFleetClient(http, patience_s=60.0) as client:
        with pytest.raises(
            FleetError, match=r"no fleet answers at http://fleet \(refused\); start a fleet with `make serve`"
        ):
            await require_fleet(client)


@pytest.mark.parametrize("call", ["step", "publish"])
async def test_what_was_done_before_its_answer_was_lost_is_not_done_again(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.loses[call] = 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert len(fleet.batches) == 2 and fleet.labels == ["step 1", "step 2"]
    assert [record.version for record in records] == [5, 6]
    assert capsys.readouterr().out.count("asking the trainer whether it was done") == 1


async def test_a_trainer_that_restarts_is_waited_for_and_the_step_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.restarts = 2
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert [record.version for record in records] == [5, 6] and len(fleet.batches) == 2
    out = capsys.readouterr().out
    assert out.count("/train/step: trying again for up to 10 s") == 1


class Killed(Exception):
    """The job, where a test kills it."""


class KillingFleet(FakeFleet):
    """The job does not live to see the answer to one of its calls, done or not."""

    def __init__(self, path: str, *, done: bool) -> None:
        super().__init__()
        self.kills: str | None = path
        self.done = done

    async def answer(self, request: httpx.Request) -> httpx.Response:
        kills = self.kills == request.url.path and len(self.labels) == 1
        answer = await super().answer(request) if self.done or not kills else None
        if answer is None or kills:
            self.kills = None
            raise Killed
        return answer


@pytest.mark.parametrize(
    ("path", "done"),
    [("/train/step", True), ("/train/step", False), ("/train/publish", True), ("/train/publish", False)],
)
async def test_a_job_that_was_killed_in_a_step_learns_from_each_problem_once(
    path: str, done: bool, tmp_path: Path
) -> None:
    fleet = KillingFleet(path, done=done)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4")
    assert len(metrics.records(tmp_path / "m.jsonl")) == 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", resuming=True)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert len(fleet.batches) == 4, "one batch a step, and none twice"
    assert fleet.labels == ["step 1", "step 2", "step 3", "step 4"]
    assert [record.version for record in records] == [5, 6, 7, 8]
    assert records[-1].next_problem + len(records[-1].consumed_ahead) == 8, "four steps of two problems"


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


async def test_a_task_without_any_signal_ends_dynamic_sampling_with_a_sentence(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.same = True
    with pytest.raises(ValueError, match="--dynamic-sampling left out 100 groups for one step"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1", "--dynamic-sampling")


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


async def test_what_is_too_long_loses_reward_for_its_advantage_alone(tmp_path: Path) -> None:
    fleet = FakeFleet()
    given = ["--steps", "1", "--max-tokens", "3", "--overlong-buffer", "2", "--advantage", "dr_grpo"]
    (record,) = await run_job(fleet, tmp_path / "m.jsonl", *given)
    assert record.reward == 2.0
    # rewards 1, 2, 3 and penalties 0, -0.5, -1
    assert [each.advantage for each in fleet.batches[0][:3]] == [-0.5, 0.0, 0.5]


def test_the_state_says_what_is_in_flight_and_ready(tmp_path: Path) -> None:
    options = parse(Options, [])
    policy = Policy(client=FakeFleet().client(), model="m", sampling=Sampling(answers=8, max_tokens=1))
    queue = GroupQueue(capacity=12, max_staleness=2)
    environment = Single(CountingTask())
    run = Run(options, environment, environment, policy, tmp_path / "m", queue, version=4, in_flight=6)
    shown = run.state()
    assert "step 1 of 20: waiting for answers; 6 prompts in flight (48 answers), 0 of 12 groups" in shown
    assert "version 4" in shown


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
    kept = str(tmp_path / "best" / "m-step-1")
    assert fleet.saved == [kept], "later versions are no better"
    assert fleet.published == [{"path": kept, "label": "best of m: reward 1.500"}]


async def test_a_version_that_cannot_be_kept_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = KeepingFleet()
    fleet.full = True
    records = await run_job(fleet, tmp_path / "m.jsonl", *BEST, "--keep-best", str(tmp_path / "best"))
    assert len(records) == 4 and fleet.published == []
    assert "the best version could not be kept" in capsys.readouterr().out


async def test_a_resumed_run_knows_which_version_was_best(tmp_path: Path) -> None:
    fleet = KeepingFleet()
    given = [*BEST, "--keep-best", str(tmp_path / "best")]
    await run_job(fleet, tmp_path / "m.jsonl", *given, "--steps", "2")
    fleet.published.clear()
    await run_job(fleet, tmp_path / "m.jsonl", *given, resuming=True)
    assert len(fleet.saved) == 1
    assert [body["path"] for body in fleet.published] == fleet.saved
