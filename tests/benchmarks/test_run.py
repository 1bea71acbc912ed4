import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recipe
from benchmarks.recipe import Step
from benchmarks.recovery import marked, victims
from benchmarks.run import Watch, figures, line, reason


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" 8 - 2 = 6.", 1),
        ("\n6\nand 7", 1),
        ("the answer is 7", 0),
        ("6 or 8", 0),
        ("", 0),
    ],
)
def test_the_last_number_of_the_first_line_is_graded(text: str, reward: float) -> None:
    assert recipe.graded(text, "6") == reward
    assert recipe.rewards([[{"role": "assistant", "content": text}]], ["6"]) == [reward]


def test_problems_are_those_of_the_seed_and_have_their_answers() -> None:
    made = recipe.problems(3, 50)
    assert made == recipe.problems(3, 50) != recipe.problems(4, 50)
    for each in made:
        expression = each["messages"][-1]["content"].rpartition(": ")[2].removesuffix(" =")
        left, sign, right = expression.split()
        assert int(each["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def step(number: int, ended: float, reward: float) -> Step:
    return Step(step=number, ended=ended, reward=reward, tokens=100.0, staleness=1.0, update_s=0.5)


def test_a_record_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert recipe.steps(path) == []
    step(1, 10.0, 0.5).append(path)
    with path.open("a") as file:
        file.write('{"step": 2')
    assert recipe.steps(path) == [step(1, 10.0, 0.5)]


def test_the_goal_counts_from_the_start_of_training_and_rates_end_with_the_kill() -> None:
    watch = Watch([])
    watch.samples = [(12.0, 1000.0), (14.0, 1400.0), (14.5, 50.0), (40.0, 900.0)]
    done = [
        step(1, 12.0, 0.2),
        step(2, 13.0, 0.7),
        step(3, 14.0, 0.8),
        step(4, 15.0, 0.9),
        step(5, 40.0, 1.0),
    ]
    row = figures(done, 10.0, 15.5, 0.7, watch)
    assert (row["to_goal_s"], row["steps_to_goal"]) == (5.0, 4)  # steps 2 to 4 have a mean of 0.8
    assert (row["steps_after_kill"], row["outage_s"]) == (1, 24.5)
    assert (row["tokens_per_s"], row["step_s"]) == (100.0, 1.0)
    assert row["lost"] == pytest.approx(0.25)  # 300 of 400; the engine that was new began with 50
    assert json.loads(json.dumps(row))["records"][0]["step"] == 1
    assert line({"program": "ours", **row}).startswith("| ours |  | 5 | 1.00 | 5.0 | 4 |")


def test_a_failed_learner_has_its_last_error_as_a_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: early\nValueError: expected a\n  note\n")
    assert reason(log, 1) == "ended with 1: ValueError: expected a"
    assert reason(log, 0) == ""


def test_an_engine_that_is_to_be_killed_is_found_by_its_title() -> None:
    program = "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | marked("one"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as engine:
        assert engine.stdout is not None and engine.stdin is not None and engine.stdout.readline()
        try:
            assert victims("VLLM::EngineCore", "one") == [engine.pid]
            assert victims("VLLM::EngineCore", "other") == []
        finally:
            engine.stdin.close()
