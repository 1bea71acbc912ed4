from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.jobs.tasks import (
    Extraction,
    PromptFileTask,
    ReasoningGymTask,
    checked,
    last_number,
    load_reward,
)


def length_reward(entry: Mapping[str, Any], answer: str) -> float:
    return float(len(answer))


def of_one_argument(answer: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("8", "8"),
        ("6 + 2 = 8.", "8"),
        ("5 - 3", "3"),
        ("7-8", "8"),
        ("2 - 8 = -6", "-6"),
        ("The result is -12.5, I think", "-12.5"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_graded(answer: str, number: str) -> None:
    assert last_number(answer) == number


def test_the_first_line_is_what_comes_before_the_first_break() -> None:
    assert Extraction.FIRST_LINE.of("\n Paris \nand more") == "Paris"


def test_a_reward_is_found_by_its_import_path() -> None:
    assert load_reward(f"{__name__}:length_reward")({}, "abc") == 3.0


def test_a_reward_must_take_an_entry_and_an_answer() -> None:
    with pytest.raises(ValueError, match=r"of_one_argument' must take \(entry, answer\)"):
        load_reward(f"{__name__}:of_one_argument")


@pytest.mark.parametrize("reward", [None, "1", float("nan"), float("inf"), [1.0]])
def test_a_reward_must_be_a_finite_number(reward: object) -> None:
    with pytest.raises(ValueError, match="the reward must return a finite number"):
        checked(reward, "the reward")
    assert checked(True, "the reward") == 1.0


SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(seed: int = 0) -> ReasoningGymTask:
    return ReasoningGymTask(
        "chain_sum", SETTINGS, instruction="Solve it.", seed=seed, extract=Extraction.LAST_NUMBER
    )


def test_a_problem_is_the_same_every_time_and_differs_between_seeds() -> None:
    first = [sums().problem(number).messages[-1] for number in range(20)]
    assert first == [sums().problem(number).messages[-1] for number in range(20)]
    other = [sums(seed=1).problem(number).messages[-1] for number in range(20)]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10
    assert first[1:] != other[:-1]


def test_the_instruction_comes_before_the_question() -> None:
    messages = sums().problem(3).messages
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Solve it."


def test_the_score_is_the_tasks_own_of_the_last_number() -> None:
    task = sums()
    problem = task.problem(0)
    right = problem.entry["answer"]
    assert task.score(problem, right) == 1.0
    assert task.score(problem, f"1 + 1 = {right}.") == 1.0
    assert task.score(problem, f"{right}, no: 1234") < 0.5
    assert task.score(problem, "") == 0.0


@pytest.mark.parametrize(("name", "settings"), [("no_such_set", {}), ("chain_sum", {"min_terms": 0})])
def test_a_data_set_that_cannot_be_made_is_named(name: str, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"reasoning-gym refuses '{name}'"):
        ReasoningGymTask(name, settings, instruction="", seed=0, extract=Extraction.WHOLE)


def test_prompts_of_a_file_repeat_and_are_scored_by_the_users_reward(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "2 + 2?", "right": "4"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    task = PromptFileTask(file, lambda entry, answer: answer == entry.get("right"), extract=Extraction.WHOLE)
    assert task.problem(0) == task.problem(2)
    assert task.problem(0).messages == [{"role": "user", "content": "2 + 2?"}]
    assert task.problem(1).messages == [{"role": "user", "content": "hi"}]
    assert task.score(task.problem(0), " 4 ") == 1.0


def test_a_fault_of_the_reward_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "2 + 2?"}')
    task = PromptFileTask(
        tmp_path / "p.jsonl", lambda entry, answer: float(entry["right"]), extract=Extraction.WHOLE
    )
    with pytest.raises(ValueError, match=r"^the reward raised KeyError: 'right' \(test_tasks.py:\d+\)$"):
        task.score(task.problem(0), "4")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "at least one line"),
        ("{", ":1 must be JSON"),
        ('{"a": 1}', ":1 must be an object with 'messages'"),
    ],
)
def test_a_wrong_prompt_file_is_refused_with_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        PromptFileTask(tmp_path / "p.jsonl", lambda entry, answer: 0.0, extract=Extraction.WHOLE)
    with pytest.raises(ValueError, match="cannot be read"):
        PromptFileTask(tmp_path / "nowhere", lambda entry, answer: 0.0, extract=Extraction.WHOLE)
