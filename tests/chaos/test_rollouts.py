"""The RL job, its trainer, the controller, the router or a replica is killed while rollouts are open,
rewarded, taken or learned from.

    job ──► recorder ──► fleet        the recorder kills before it passes on what begins the case's moment

One run goes through all cases, and is resumed when its job is killed. What the recorder saw and what the job
wrote down must agree: each prompt was consumed by one step, or is open, ready, or left out with its reason.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.jobs import metrics
from app.jobs.metrics import StepRecord
from tests.chaos.launching import SETTINGS, Launched, launch
from tests.clients.recorder import Record, recorded
from tests.environment import users_environment
from tests.fleet.deployed import merged
from tests.tiny_models import save_tiny_llama
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("rollouts"),
    pytest.mark.long,
    pytest.mark.timeout(600),
]
TARGETS = ("job", "trainer", "controller", "router", "replica")
# The first call in the moment.
MOMENTS = {
    "open": "/v1/chat/completions",
    "rewarded": "/rollouts/take",
    "taken": "/train/step",
    "learned": "/train/publish",
}
CASES = [(target, moment) for moment in MOMENTS for target in TARGETS]
GROUPS, STEPS_AFTER, STEP_S = 2, 2, 240.0
PROMPTS = 40
REWARD = "async def length(entry, answer):\n    return float(len(answer) % 5)\n"
OPTIONS = (
    f"--steps 100000 --groups-per-step {GROUPS} --answers-per-group 3 --groups-in-flight 3 --max-tokens 24 "
    "--extract whole --prompts prompts.jsonl --reward lengths:length --metrics run.jsonl"
)


@dataclass
class RunOfJobs:
    """One run, whose jobs follow each other, and what was seen of it from outside."""

    launched: Launched
    record: Record
    root: Path
    armed: str | None = None  # a path
    target: str = ""
    struck_at: float = 0.0
    killed: Counter[str] = field(default_factory=Counter)
    job: subprocess.Popen[bytes] | None = None

    def before(self, path: str, headers: dict[str, str]) -> None:
        """A call that is under way when an answer is made gets its kill a little later."""
        if path.partition("?")[0] != self.armed:
            return
        self.armed = None
        if path == MOMENTS["open"]:
            threading.Timer(0.05, self.strike).start()
        else:
            self.strike()

    def strike(self) -> None:
        assert self.job is not None
        pid = self.job.pid if self.target == "job" else self.launched.named(self.target)[0].pid
        psutil.Process(pid).kill()
        self.killed[self.target] += 1
        self.struck_at = time.monotonic()

    def ensure_job(self) -> None:
        """The job, which ends only when it is killed."""
        if self.job is not None and self.job.poll() is None:
            return
        assert self.job is None or self.job.returncode == -9, (self.root / "job.log").read_text()[-3000:]
        command = [sys.executable, "-m", "app.jobs", "--url", self.record.url, *OPTIONS.split()]
        command += ["--resume"] * (self.root / "run.jsonl").exists()
        with (self.root / "job.log").open("ab") as output:
            self.job = subprocess.Popen(
                command, cwd=self.root, stdout=output, stderr=output, env=users_environment()
            )

    def steps(self) -> list[StepRecord]:
        self.ensure_job()
        with suppress(ValueError):  # not yet there
            return metrics.records(self.root / "run.jsonl")
        return []

    def until_steps(self, more: int) -> None:
        wanted = len(self.steps()) + more
        until(lambda: len(self.steps()) >= wanted, STEP_S, f"step {wanted}", pause_s=0.3)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunOfJobs]:
    root = tmp_path_factory.mktemp("rollouts")
    (root / "lengths.py").write_text(REWARD)
    prompts = [json.dumps({"prompt": f"number {number}"}) for number in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("\n".join(prompts))
    model = save_tiny_llama(root / "model", seed=1)
    with (
        launch(root, model, merged(SETTINGS, {"rollouts": {}})) as launched,
        recorded(launched.url, lambda *call: run.before(*call)) as record,
    ):
        run = RunOfJobs(launched, record, root)
        try:
            run.until_steps(1)
            yield run
            until(
                lambda: is_whole(launched),
                STEP_S,
                "full strength, so that what is left behind is the fleet's",
            )
        finally:
            if run.job is not None:
                run.job.kill()
                run.job.wait()


def is_whole(launched: Launched) -> bool:
    with launched.client() as client:
        members = client.get("/fleet").json()["members"]
    return len([each for each in members if each["state"] == "serving"]) == launched.replicas


def chosen() -> list[tuple[str, str]]:
    count = os.environ.get("CHAOS_CASES")
    return CASES if count is None else random.Random(os.environ.get("CHAOS_SEED")).sample(CASES, int(count))


@pytest.mark.parametrize(("target", "moment"), chosen())
def test_each_prompt_is_consumed_once_or_left_out_with_its_reason(
    jobs: RunOfJobs, target: str, moment: str
) -> None:
    before, kills = len(jobs.steps()), jobs.killed[target]
    jobs.target, jobs.armed = target, MOMENTS[moment]
    until(lambda: jobs.killed[target] > kills, STEP_S, "the moment of the case")
    jobs.until_steps(STEPS_AFTER)
    took_s = round(time.monotonic() - jobs.struck_at, 1)
    line = {"case": f"kill-{target}-{moment}", "s": took_s, "steps": len(jobs.steps()) - before}
    line |= accounted_for(jobs)
    with (jobs.root / "cases.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def accounted_for(jobs: RunOfJobs) -> dict[str, Any]:
    """What became of all prompts so far. Fails if one was lost, was consumed twice, or has a wrong reward."""
    run = last_run(jobs.root)
    taken, position = settled(jobs, run)
    consumed = Counter(group for groups in taken.values() for group in groups)
    assert set(consumed.values()) == {1}, "a group was consumed twice"
    ends = position["ends"]
    assert position["next"] == len(position["open"]) + position["ready"] + sum(ends.values())
    learned = [step.trainer["step"] for step in jobs.steps() if step.trainer]
    assert isinstance(learned[0], int)
    assert learned == list(range(learned[0], learned[0] + len(learned))), "a step was lost, or made twice"
    done = {f"{run}/{step.step}" for step in jobs.steps()}
    lines = (jobs.root / "run.rollouts.jsonl").read_text().split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    written = {(f"{run}/{row['step']}", f"{run}.{row['problem']}") for row in rows}
    assert {(step, group) for step in done for group in taken[step]} == {w for w in written if w[0] in done}
    assert all(row["reward"] == len(row["text"].strip()) % 5 for row in rows)
    said, rewards = answers(jobs.record), rewards_of(jobs.record)
    for rollout in (each for groups in taken.values() for rollouts in groups.values() for each in rollouts):
        (sequence,) = rollout["sequences"]
        assert sequence["token_ids"] == said[rollout["id"]], "its client got other tokens"
        assert rollout["reward"] == rewards[rollout["id"]]
    others = {reason: count for reason, count in ends.items() if reason != "consumed"}
    return {"prompts": position["next"], "consumed": len(consumed), "left_out": others, "answers": len(said)}


def last_run(root: Path) -> str:
    configuration = metrics.last_configuration(root / "run.jsonl")
    assert configuration is not None
    return configuration.run_id


def settled(jobs: RunOfJobs, run: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Groups by step, as the recorder saw them, and the ledger's counts, without a call between them."""
    taken: dict[str, dict[str, Any]] = {}
    position: dict[str, Any] = {}

    def agree() -> bool:
        nonlocal taken, position
        with jobs.launched.client() as client:
            position = client.get(f"/rollouts/runs/{run}").json()
        taken = taken_by_steps(jobs.record)
        return position["ends"]["consumed"] == sum(map(len, taken.values()))

    until(agree, 60, "as many consumed groups in the ledger as trainers were given")
    return taken, position


def taken_by_steps(record: Record) -> dict[str, dict[str, Any]]:
    taken: dict[str, dict[str, Any]] = {}
    for call in [each for each in record.of("/rollouts/take") if each.status == 200]:
        if (step := call.answer_json["step"]) is not None:
            groups = {each["group"]: each["rollouts"] for each in call.answer_json["groups"]}
            assert taken.setdefault(step, groups) == groups, "a step got other groups when it asked again"
    return taken


def answers(record: Record) -> dict[str, list[int]]:
    """The tokens of the last answer to each rollout, each of them to the prompt of its group's number."""
    said = {}
    for call in [each for each in record.of(MOMENTS["open"]) if each.status == 200]:
        number = int(call.headers["x-rollout-group"].rpartition(".")[2])
        assert call.json["messages"][0]["content"] == f"number {number % PROMPTS}"
        rollouts = call.headers["x-rollout-id"].split(",")
        choices = [choice["token_ids"] for choice in call.answer_json["choices"]]
        said |= dict(zip(rollouts, choices, strict=True))
    return said


def rewards_of(record: Record) -> dict[str, float]:
    settles = [call for call in record.of("/rollouts/settle") if call.status == 200]
    groups = [group for call in settles for group in call.json["groups"]]
    return {each["id"]: each["reward"] for group in groups for each in group["rollouts"]}
