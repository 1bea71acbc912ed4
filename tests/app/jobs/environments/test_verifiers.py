"""Rollouts by a real process that speaks as verifiers' program does, against a fleet that is a function."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client.connection import FleetError
from app.jobs.environments.environment import HELD_OUT
from app.jobs.environments.verifiers import MAX_FAILURES, Verifiers, VerifiersSettings
from app.jobs.policy import Policy, Unanswered
from tests.app.fake_answers import chat_choice, client_of, refusal
from tests.app.jobs.environments import rollouts_program

pytestmark = pytest.mark.slow  # each starts a program
ROOT = Path(__file__).parents[4]
END_S = 60.0  # the deadline of a test for what ends by itself


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are kept."""
    place = tmp_path / "logs"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def fake_python(folder: Path) -> str:
    """An interpreter that runs the fake program, whichever it is asked for."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {rollouts_program.__file__} "$@"\n')
    python.chmod(0o755)
    return str(python)


def environment(how: str, folder: Path, **settings: Any) -> Verifiers:
    variables = {"PYTHONPATH": str(ROOT), "COLOUR": "blue"}
    given = {"command": f"'{how}' {folder}", "python": fake_python(folder), "variables": variables}
    return Verifiers(VerifiersSettings.model_validate(given | settings))


class TwoTurnFleet:
    """Each prompt begins with what was said before it."""

    def __init__(self) -> None:
        self.asked = 0
        self.turns: dict[str, list[int]] = {}  # by rollout
        self.status = {1: 200, 2: 200}  # of a turn
        self.says = "this model's maximum context length is 8 tokens"

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        turn = len(json.loads(request.content)["messages"])
        if self.status[turn] != 200:
            return refusal(self.status[turn], "x", self.says)
        self.turns.setdefault(request.headers["x-rollout-id"], []).append(turn)
        choice = chat_choice([10 * turn, 10 * turn + 1], text=f"turn {turn}", version=4 + turn)
        return httpx.Response(200, json={"choices": [choice]})

    @asynccontextmanager
    async def policy(self) -> AsyncIterator[Policy]:
        async with client_of(self.answer, patience_s=0.0) as client:
            yield Policy(client=client, model="m", max_tokens=8, group="r.1")


async def test_the_rollout_of_the_agent_is_rewarded_and_its_judges_is_not(tmp_path: Path) -> None:
    made, fleet = environment("plays", tmp_path), TwoTurnFleet()
    async with fleet.policy() as policy, made.running():
        first, second = await made.rollouts(HELD_OUT + 3, 2, policy)
    assert (first.reward, first.turns, first.tokens) == (second.reward, 2, 4) and first.reward == 3.0
    assert fleet.turns[first.id] == fleet.turns[second.id] == [1, 2] and first.id != second.id
    assert sorted(fleet.turns.values()) == [[1], [1], [1, 2], [1, 2]]


async def test_the_program_does_not_get_the_fleets_token_and_reaches_the_relay_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLIPSTREAM_TOKEN", "SLIPSTREAM_TEACHER_TOKEN", "SLIPSTREAM_JUDGE_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SLIPSTREAM_URL", "http://name:secret@fleet")
    monkeypatch.setenv("HF_TOKEN", "the environment's own")
    monkeypatch.setenv("NO_PROXY", "example.org")
    made = environment("plays", tmp_path)
    async with TwoTurnFleet().policy() as policy, made.running():
        (rollout,) = await made.rollouts(0, 1, policy)
    seen = json.loads(rollout.text)
    assert seen == {
        "NO_PROXY": "example.org,127.0.0.1",
        "COLOUR": "blue",
        "HF_TOKEN": "the environment's own",
    }


@pytest.mark.parametrize("how", ["raises once", "dies once", "reads"])
async def test_one_rollout_that_fails_is_tried_again(how: str, tmp_path: Path) -> None:
    made = environment(how, tmp_path)
    async with TwoTurnFleet().policy() as policy, made.running():
        rollouts = await asyncio.wait_for(made.rollouts(2, 3, policy), END_S)
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "verifiers: RuntimeError: the tool is broken$"),
        ("dies", "verifiers: its process has ended: no memory is left"),
        ("hangs", "verifiers: a rollout took longer than 0.5 s$"),
    ],
)
async def test_a_problem_whose_rollouts_fail_is_left_out_with_the_reason(
    how: str, said: str, tmp_path: Path
) -> None:
    made = environment(how, tmp_path, rollout_timeout_s=0.5)
    async with TwoTurnFleet().policy() as policy, made.running():
        with pytest.raises(Unanswered, match=said):
            await asyncio.wait_for(made.rollouts(0, 2, policy), END_S)
    assert (tmp_path / "cancelled").exists() is (how == "hangs")


async def test_an_environment_that_only_fails_ends_the_run(tmp_path: Path) -> None:
    made = environment("raises", tmp_path)
    async with TwoTurnFleet().policy() as policy, made.running():
        for number in range(MAX_FAILURES - 1):
            with pytest.raises(Unanswered):
                await made.rollouts(number, 1, policy)
        with pytest.raises(ValueError, match=f"{MAX_FAILURES} problems of verifiers in a row have failed"):
            await made.rollouts(MAX_FAILURES, 1, policy)


async def test_a_fleet_that_fails_is_no_fault_of_the_rollout_and_ends_it(tmp_path: Path) -> None:
    fleet = TwoTurnFleet()
    fleet.status[2] = 503
    made = environment("plays", tmp_path)
    async with fleet.policy() as policy, made.running():
        with pytest.raises(FleetError, match="maximum context length"):
            await asyncio.wait_for(made.rollouts(0, 1, policy), END_S)
    assert fleet.asked == 3


async def test_a_conversation_that_gets_too_long_has_no_reward_and_is_learned_from(tmp_path: Path) -> None:
    fleet = TwoTurnFleet()
    fleet.status[2] = 400
    made = environment("plays", tmp_path)
    async with fleet.policy() as policy, made.running():
        (rollout,) = await made.rollouts(3, 1, policy)
    assert rollout.reward == 0.0 and rollout.text == "turn 1"
    assert (rollout.tokens, rollout.cut) == (2, True) and fleet.turns[rollout.id] == [1]


async def test_a_request_that_the_fleet_does_not_take_is_no_reward_of_0(tmp_path: Path) -> None:
    fleet = TwoTurnFleet()
    fleet.status[2], fleet.says = 400, "this model calls no tools"
    made = environment("plays", tmp_path)
    async with fleet.policy() as policy, made.running():
        with pytest.raises(Unanswered, match="verifiers: "):
            await made.rollouts(3, 1, policy)


async def test_a_prompt_that_is_too_long_is_left_out_at_once(tmp_path: Path) -> None:
    fleet = TwoTurnFleet()
    fleet.status[1] = 400
    made = environment("plays", tmp_path)
    async with fleet.policy() as policy, made.running():
        with pytest.raises(Unanswered):
            await made.rollouts(3, 1, policy)
    assert fleet.asked == 1


async def test_a_task_set_that_is_refused_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    made = environment("has no tasks", tmp_path)
    with pytest.raises(ValueError, match="does not start: ValueError: the task set has no tasks"):
        async with made.running():
            pass


def is_running(file: Path) -> bool:
    try:
        state = Path(f"/proc/{file.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_program_ends_in_order_with_all_that_it_started(tmp_path: Path) -> None:
    made = environment("starts another", tmp_path)
    async with TwoTurnFleet().policy() as policy, made.running():
        await made.rollouts(0, 1, policy)
        assert is_running(tmp_path / "pid") and is_running(tmp_path / "other")
    assert (tmp_path / "ended").exists(), "it was not killed"
    assert not is_running(tmp_path / "pid") and not is_running(tmp_path / "other")


JOB = """
import asyncio, sys
from pathlib import Path
from tests.app.jobs.environments.test_verifiers import TwoTurnFleet, environment

async def main():
    made = environment("starts another", Path(sys.argv[1]))
    async with TwoTurnFleet().policy() as policy, made.running():
        await made.rollouts(0, 1, policy)
        print("it runs", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_left_of_a_job_that_was_killed(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        assert "it runs\n" in lines
        job.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while is_running(tmp_path / "pid") or is_running(tmp_path / "other"):
        assert time.monotonic() < deadline, "the program, or what it had started, outlived the job"
        time.sleep(0.05)
    assert (tmp_path / "ended").exists()
