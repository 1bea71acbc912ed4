import dataclasses

import pytest

from app.client.connection import LOCAL_URL
from app.client.options import parse
from app.jobs.options import Options
from app.jobs.rewards import EXTRACTORS, Extraction
from app.jobs.tasks import ReasoningGymTask


def test_the_defaults_are_those_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_URL", raising=False)
    options = parse(Options, [])
    assert options == Options()
    assert options.url == LOCAL_URL and options.stop_strings == ("\n",)
    assert isinstance(options.load_task(), ReasoningGymTask)


def test_every_option_is_read() -> None:
    words = ["--stop", "a", "--stop", "b", "--advantage", "rloo", "--extract", "whole", "--resume"]
    numbers = ["--steps", "3", "--groups-in-flight", "9", "--max-staleness", "0", "--seed", "-1"]
    options = parse(Options, [*words, *numbers, "--prompts", "p.jsonl", "--reward", "a:b"])
    assert options.stop_strings == ["a", "b"] and options.resume
    assert (options.steps, options.groups_in_flight, options.max_staleness, options.seed) == (3, 9, 0, -1)
    assert (str(options.prompts), options.reward) == ("p.jsonl", "a:b")


def test_every_way_to_grade_has_its_function() -> None:
    assert set(EXTRACTORS) == set(Extraction)


@pytest.mark.parametrize(
    "arguments", [["--answers-per-group", "1"], ["--steps", "0"], ["--extract", "all"], ["--advantage", "x"]]
)
def test_a_wrong_option_ends_the_job_with_its_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(Options, arguments)
    assert f"Invalid value for '{arguments[0]}'" in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        Options(reward="a:b").load_task()
    with pytest.raises(ValueError, match="--task-settings: expected a JSON object"):
        dataclasses.replace(Options(), task_settings="[]").load_task()
