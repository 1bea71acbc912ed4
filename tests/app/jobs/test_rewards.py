from collections.abc import Mapping
from typing import Any

import pytest

from app.jobs.rewards import checked, first_line, last_number, load_reward


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
    assert first_line("\n Paris \nand more") == "Paris"


def test_a_reward_is_found_by_its_import_path() -> None:
    assert load_reward(f"{__name__}:length_reward")({}, "abc") == 3.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json", "must look like package.module:function"),
        ("no_such_module:f", "cannot be imported"),
        ("json:no_such_function", "cannot be imported"),
        (f"{__name__}:of_one_argument", "must take"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(path)


@pytest.mark.parametrize("reward", [None, "1", float("nan"), float("inf"), [1.0]])
def test_a_reward_must_be_a_finite_number(reward: object) -> None:
    with pytest.raises(ValueError, match="the reward must return a finite number"):
        checked(reward, "the reward")
    assert checked(True, "the reward") == 1.0
