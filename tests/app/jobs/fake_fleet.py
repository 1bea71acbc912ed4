"""A fleet that is a function, with a real ledger of rollouts, and a job that runs against it."""

import asyncio
import json
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from app.client.completions import Answer
from app.client.connection import AsyncFleetClient
from app.client.program_options import parse
from app.http.requests import BeginBody, SettleBody, TakeBody
from app.jobs import metrics
from app.jobs.environments.environment import Problem, Task
from app.jobs.groups import Rollout
from app.jobs.grpo import configured, loop, prepared
from app.jobs.metrics import StepRecord
from app.jobs.options import JobOptions
from app.jobs.policy import Policy
from app.jobs.run_display import Display
from app.jobs.teacher import Teacher
from app.jobs.trackers import Trackers
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.responses import FleetLoad, ReplicaLoad
from deployments.protocol.rollouts import CapturedTurn, RolloutLimits, rollout_of
from deployments.rollouts.store import RolloutStore
from tests.app.fake_answers import chat_choice, client_of, refusal
from tests.app.http.fake_status import report
from tests.app.http.fake_trainer import STATUS
from trainers.trajectory import Trajectory
from trainers.trajectory_arrays import from_bytes, settings_of

LIMITS = RolloutLimits(max_rollouts=999, max_gib=1.0, keep_s=3600.0)
CHAT = "/v1/chat/completions"


class CountingTask(Task):
    """The longer the answer, the better."""

    def __init__(self, problems: int = 1 << 40) -> None:
        self._problems = problems

    @property
    def problems(self) -> int:
        return self._problems

    def problem(self, number: int) -> Problem:
        source = "odd" if number % 2 else "even"
        return Problem(messages=[{"role": "user", "content": str(number)}], entry={}, source=source)

    async def score(self, problem: Problem, answer: Answer) -> float:
        return float(len(answer.text))


class FakeFleet:
    """Answers the routes that the job uses; every publish is a version."""

    def __init__(self) -> None:
        self.version = 4
        self.trainer_version: int | None = None  # None: the fleet's
        self.missed: str | None = None
        self.batches: list[list[Trajectory]] = []
        self.settings: list[str | None] = []  # that came with batches
        self.labels: list[str] = []  # of versions, without the run's name
        self.made: dict[str, dict[str, float]] = {}  # steps, by label
        self.published: dict[str, int] = {}  # since the newest step, by label
        self.abort_next = False
        self.same = False
        self.steps = 3
        self.metrics: dict[str, float] = {"loss": 0.5}  # of each step
        self.restarts = 0  # steps in which the trainer dies
        self.dies_before_publishing = 0  # rounds: its successor resumes from the step before
        self.busy = 0  # answers of its status after a lost one in which it still does what it was asked for
        self.loses: dict[str, int] = {}  # step or publish -> answers that are lost after it was done
        self.reports: list[dict[str, Any]] = []  # of steps, for the page
        self.beside: str | None = None  # what the trainer does between steps
        self.refuses_reports = False
        self.reports_after = 0  # batches: the page takes a report only then
        self.load = ReplicaLoad(generated_tokens=0, running=0, waiting=0, kv_cache_use=0.0)  # each replica's
        self.refused_batches = 0  # that the trainer will refuse
        self.deadly: set[str] = set()  # prompts that it refuses to answer
        self.asked_for: Counter[str] = Counter()  # answers to a prompt
        self._directory = tempfile.TemporaryDirectory()
        self.store = RolloutStore(Path(self._directory.name), LIMITS, "fleet")
        self.store._db.execute("PRAGMA synchronous=OFF")  # no test takes away the power

    def client(self) -> AsyncFleetClient:
        return client_of(self.answer, patience_s=10.0, retry_pause_s=0.1, say=print)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        match request.url.path:
            case "/health":
                body = {"status": "ok", "serving": 1, "members": 1, "weight_version": self.version}
                return httpx.Response(200, json=body)
            case "/fleet/load":
                loads = FleetLoad(at=0.0, replicas={"a": self.load, "b": self.load}, dashboard=None)
                return httpx.Response(200, json=asdict(loads))
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}]})
            case "/train/status":
                self.busy, doing = max(0, self.busy - 1), "step" if self.busy else self.beside
                steps = self.steps - 1 if doing == "step" else self.steps
                current = {
                    "step": steps,
                    "version": self.version if self.trainer_version is None else self.trainer_version,
                    "missed": self.missed,
                    "doing": doing,
                }
                return httpx.Response(200, json=asdict(STATUS) | current)
            case "/v1/chat/completions":
                asked = json.loads(request.content)
                try:
                    if "x-rollout-id" in request.headers:
                        self.store.open(rollout_of(request.headers, "", CHAT))
                except SlipstreamError as error:
                    return httpx.Response(error.status, json=error.body())
                if asked["messages"][0]["content"] in self.deadly:
                    return refusal(422, "deadly_request", "2 replicas were lost under this request")
                completion = self.completion({**asked, "at": request.headers.get("x-min-weight-version")})
                if "x-rollout-id" in request.headers and completion["choices"]:
                    self.capture(request.headers, completion)
                return httpx.Response(200, json=completion)
            case path if path.startswith("/rollouts/"):
                return self.rollouts(path, request.content)
            case "/train/step":
                if self.restarts:
                    self.restarts -= 1
                    self.steps = max(0, self.steps - 1)  # the trainer resumes from an older version
                    return refusal(503, "fleet_unavailable", "another one is being started")
                label = request.url.params["label"]
                if label in self.made:
                    return httpx.Response(200, json=self.made[label])
                if int(request.url.params["done"]) != self.steps:
                    return refusal(409, "other_step", f"got one after step {self.steps}")
                if self.refused_batches:
                    self.refused_batches -= 1
                    return refusal(400, "invalid_request", "a log-probability is infinite")
                self.batches.append(from_bytes(request.content))
                self.settings.append(settings_of(request.content))
                self.steps += not self.metrics.get("skipped")
                self.made[label] = {**self.metrics, "step": self.steps}
                self.published.clear()
                self.lose("step", request)
                return httpx.Response(200, json=self.made[label])
            case "/train/publish":
                asked = json.loads(request.content)
                if self.dies_before_publishing and asked.get("step") == self.steps:
                    self.dies_before_publishing -= 1
                    self.made.popitem()
                    self.steps -= 1
                    return refusal(503, "fleet_unavailable", "another one is being started")
                if asked.get("step", self.steps) != self.steps:
                    return refusal(409, "other_step", f"got one after step {self.steps}")
                if self.abort_next:
                    self.abort_next = False
                    return refusal(409, "round_aborted", "x")
                if (label := asked["label"]) not in self.published:
                    self.version += 1
                    self.labels.append(label.rpartition("/")[2])
                    self.published[label] = self.version
                self.lose("publish", request)
                return httpx.Response(200, json=asdict(report(self.published[label], self.published[label])))
            case "/train/report":
                if self.refuses_reports:
                    return refusal(404, "not_found", "no such route")
                while len(self.batches) < self.reports_after:
                    await asyncio.sleep(0)
                self.reports.append(json.loads(request.content))
                return httpx.Response(200, json={"status": "reported"})
        return httpx.Response(404)

    def restart(self) -> None:
        """The trainer knows the labels of its steps, and no figures."""
        self.made = {label: {"step": self.steps} for label in self.made}
        self.published.clear()

    def lose(self, call: str, request: httpx.Request) -> None:
        if self.loses.get(call):
            self.loses[call] -= 1
            raise httpx.RemoteProtocolError("the server disconnected", request=request)

    def rollouts(self, path: str, content: bytes) -> httpx.Response:
        """As `rollout_routes` has it."""
        found: Any = {"status": "done"}
        try:
            match path.removeprefix("/rollouts/"):
                case "begin":
                    begin = BeginBody.model_validate_json(content)
                    self.store.begin(begin.run, begin.number, begin.count)
                case "settle":
                    settle = SettleBody.model_validate_json(content)
                    groups: Any = [
                        (each.group, {one.id: (one.reward, one.info) for one in each.rollouts}, each.reason)
                        for each in settle.groups
                    ]
                    self.store.settle(groups)
                case "take":
                    take = TakeBody.model_validate_json(content)
                    asked = (take.step, take.run, take.groups, take.max_staleness, take.offset)
                    current = {"": self.version, "math": self.version}
                    return httpx.Response(200, content=self.store.take(*asked, current))
                case run:
                    known, opened, ready = self.store.position(run.removeprefix("runs/"))
                    found = {"next": known.next, "open": opened, "ready": ready, "ends": known.ends}
        except SlipstreamError as error:
            return httpx.Response(error.status, json=error.body())
        return httpx.Response(200, json=found)

    def capture(self, headers: Mapping[str, str], completion: Mapping[str, Any]) -> None:
        turns = [
            CapturedTurn(
                key=f"{headers['x-rollout-turn']}/{number}",
                attempt=time.time_ns(),
                prompt_token_ids=array("i", [1, 2]).tobytes(),
                token_ids=array("i", choice["token_ids"]).tobytes(),
                logprobs=array("f", [-1.0] * len(choice["token_ids"])).tobytes(),
                weight_versions=((self.version, 0, len(choice["token_ids"])),),
                adapter=choice.get("adapter"),
                constrained=False,
                finish_reason=choice["finish_reason"],
                sampling={},
            )
            for number, choice in enumerate(completion["choices"])
        ]
        self.store.append("", list(zip(headers["x-rollout-id"].split(","), turns, strict=True)))

    def ends(self) -> dict[str, int]:
        """What became of the groups of the only run; one that is neither here nor in a step is lost."""
        return self.store.counts()[1]

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """Each choice is one token longer than the last answer to the same prompt."""
        prompt, choices = f"{request['messages'][0]['content']} at {request['at']}", []
        for _ in range(request["n"]):
            self.asked_for[prompt] += 1
            length = 2 if self.same else self.asked_for[prompt]
            choices.append(chat_choice([7] * length, text="x" * length, version=self.version))
        return {"choices": choices}


@dataclass
class Watched:
    """An environment that notes when it is asked."""

    environment: Task
    asked: Callable[[], None]

    @property
    def problems(self) -> int:
        return self.environment.problems

    async def rollouts(self, number: int, count: int, policy: Policy) -> Sequence[Rollout]:
        self.asked()
        return await self.environment.rollouts(number, count, policy)


async def run_job(
    fleet: FakeFleet,
    path: Path,
    *arguments: str,
    seen: list[str] | None = None,
    held_out: int = 1 << 40,
    task: CountingTask | None = None,
    teacher: Teacher | None = None,
) -> list[StepRecord]:
    """`seen`: the run's state whenever a held-out problem is asked for, and whether it samples."""
    given = ["--groups-per-step", "2", "--answers-per-group", "3", "--groups-in-flight", "2"]
    options = parse(JobOptions, [*given, "--metrics", str(path), *arguments])
    environment = task or CountingTask()
    async with fleet.client() as client:
        environments = (environment, CountingTask(held_out))
        run = await prepared(client, options, environments, path, Display(), time.monotonic())
        run.teacher = teacher
        if seen is not None:
            run.held_out = Watched(environment, lambda: seen.append(f"{run.status().line()} {run.sampling}"))
        metrics.append(path, configured(run))
        await asyncio.wait_for(loop(run, Trackers([], run.say)), 20)
    return metrics.records(path)
