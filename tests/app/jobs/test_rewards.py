import asyncio
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from app.jobs.policy import Unanswered
from app.jobs.rewards import Reward, checked, load_reward
from tests.waiting import until

EXAMPLES = "tests.app.jobs.example_rewards"


def example(name: str, **options: Any) -> Reward:
    return load_reward(f"{EXAMPLES}:{name}", **options)


@pytest.mark.parametrize("name", ["awaited_length", "judge"])
async def test_a_reward_may_be_awaited(name: str) -> None:
    assert await example(name)({}, "abc", {}) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["length", "limits_its_time", "runs_a_loop", "undeclared"])
async def test_a_function_may_do_what_it_may_in_a_program_of_its_own(name: str) -> None:
    assert await example(name)({}, "a", {}) == 1.0


@pytest.mark.slow
async def test_a_function_that_blocks_does_not_block_the_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    asked = asyncio.create_task(example("waits_for_a_file")({"file": str(file)}, "", {}))
    await asyncio.sleep(0)  # the task begins
    file.touch()
    assert await asked == 1.0


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_a_problem_that_is_larger_than_a_pipe_does_not_block_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPORT_WAITS_FOR", str(tmp_path / "file"))
    asked = asyncio.create_task(example("length")({"tests": "x" * 4_000_000}, "a", {}))
    await asyncio.sleep(0)
    (tmp_path / "file").touch()
    assert await asked == 1.0


@pytest.mark.slow
async def test_a_reward_that_is_ended_takes_along_what_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    asked = asyncio.create_task(example("starts_a_program")({"file": str(file)}, "", {}))
    while not (file.exists() and file.read_text().endswith("\n")):
        await asyncio.sleep(0.05)
    started = psutil.Process(int(file.read_text()))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    until(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, 30, "its end")


@pytest.mark.slow
async def test_answers_are_scored_one_after_the_other_in_order() -> None:
    reward = example("calls_before")
    assert await asyncio.gather(*[reward({}, str(number), {}) for number in (1, 2, 3)]) == [1.0, 12.0, 123.0]


@pytest.mark.slow
async def test_after_a_cancellation_the_next_answer_gets_its_own_reward(tmp_path: Path) -> None:
    reward = example("waits_for_a_file")
    never = asyncio.create_task(reward({"file": str(tmp_path / "never")}, "", {}))
    await asyncio.sleep(0)
    never.cancel()
    with pytest.raises(asyncio.CancelledError):
        await never
    assert await reward({"file": str(tmp_path)}, "", {}) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"^the reward raised KeyError: 'right' \(example_rewards.py:\d+\)$"),
        ("returns_nothing", "^the reward must return a finite number of at most .*, got None$"),
        ("exits", "^the reward's process exited with 3$"),
    ],
)
async def test_a_fault_of_the_reward_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await example(name)({}, "4", {})


@pytest.mark.slow
def test_the_process_of_a_reward_ends_with_the_job() -> None:
    program = (
        "import asyncio; from app.jobs.rewards import load_reward\n"
        f"asyncio.run(load_reward('{EXAMPLES}:kills_the_job')({{}}, '', {{}}))"
    )
    # It has the same output as the job, which is at its end when both have ended.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["waits_for_a_file", "never_answers"])
async def test_a_reward_has_a_deadline_after_which_its_problem_is_left_out(name: str) -> None:
    reward = example(name, timeout_s=0.01)
    for _ in range(2):
        with pytest.raises(Unanswered, match=r"the reward took longer than 0.01 s"):
            await reward({"file": "/never"}, "", {})


@pytest.mark.slow
async def test_answers_are_scored_in_several_processes(tmp_path: Path) -> None:
    """Each waits for a file that the other makes."""
    reward = example("meets_another", processes=2)
    made = [reward({"mine": str(tmp_path / a), "other": str(tmp_path / b)}, "", {}) for a, b in ("ab", "ba")]
    assert await asyncio.gather(*made) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sees_the_rest", "sees_all", "awaits_the_rest"])
async def test_a_reward_may_see_the_conversation_the_tokens_and_how_it_ended(name: str) -> None:
    given = {"messages": [{"role": "user", "content": "?"}], "token_ids": [5, 6], "finish_reason": "length"}
    assert await example(name)({}, "x", given) == 3.0


def test_a_reward_must_take_an_entry_and_an_answer() -> None:
    with pytest.raises(
        ValueError, match=r"of_one_argument' must take \(entry, answer\), and may take messages, token_ids, "
    ):
        example("of_one_argument")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([1]), 1.0),
    ],
)
def test_a_reward_may_be_any_number(reward: object, expected: float) -> None:
    assert checked(reward, "the reward") == expected


@pytest.mark.parametrize(
    "reward",
    [
        *(None, "1", float("nan"), float("inf"), 1e39, 10**400, Fraction(10**400), [1.0], 1j),
        *(np.array([1.0, 2.0]), torch.tensor(float("nan"))),
    ],
)
def test_a_reward_must_be_a_finite_number(reward: object) -> None:
    with pytest.raises(ValueError, match="the reward must return a finite number"):
        checked(reward, "the reward")
