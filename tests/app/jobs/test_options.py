import json
import sys
from pathlib import Path

import pytest

from app.client.program_options import LOCAL_URL, parse
from app.jobs.environments.verifiers import Verifiers
from app.jobs.loading import load_environments
from app.jobs.options import JobOptions
from app.jobs.tasks import PromptFileTask, ReasoningGymTask


@pytest.mark.slow
def test_the_defaults_are_those_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_URL", raising=False)
    options = parse(JobOptions, [])
    assert options == JobOptions()
    assert options.url == LOCAL_URL and options.stop_strings == ("\n",)
    learned, _ = load_environments(options)
    assert isinstance(learned, ReasoningGymTask)


def test_answers_may_have_no_stop_string(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("stop = []")
    for given in (["--stop", ""], ["@", str(tmp_path / "run.toml")]):
        assert parse(JobOptions, given).stop_strings == []
    assert parse(JobOptions, ["--stop", "a", "--stop", "b"]).stop_strings == ["a", "b"]


def verifiers(**settings: object) -> list[str]:
    return ["--environment", "verifiers", "--environment-settings", json.dumps(settings)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--reward", "a:b"], "go together"),
        (["--prompts", "x.jsonl"], "go together, unless there is a --teacher"),
        (["--environment-settings", '{"a": 1}'], "needs --environment"),
        (["--eval-prompts", "x.jsonl"], "needs --prompts"),
        (["--loss", "jsd"], "--teacher-model need --teacher"),
        (
            ["--teacher", "math@1"],
            "--teacher needs --loss forward_kl, reverse_kl, jsd or sft, .*or --teacher-kl",
        ),
        (["--teacher", "math@-", "--loss", "jsd"], "expected NAME@-K, K versions behind, got 'math@-'"),
        (["--teacher", "math@1", "--loss", "jsd", "--teacher-kl", "1"], "which read no advantages"),
        (["--task-settings", "[]"], "--task-settings: expected a JSON object"),
        (["--keep-best", "/x"], "needs --eval-every"),
        (["--dynamic-sampling", "--advantage", "reinforce_pp"], "learns too with --advantage reinforce_pp"),
        (
            ["--dynamic-sampling", "--teacher", "math@1", "--teacher-kl", "1"],
            "learns too with --teacher",
        ),
        (["--overlong-buffer", "17"], "at most 16 tokens, got 17"),
        (
            ["--metrics", "lr-0.1"],
            "--metrics must end in .jsonl",
        ),  # and lr-0.2 would share lr-0.rollouts.jsonl
        (["--environment", "mine:factory", "--prompts", "x"], "prompts and rewards of its own"),
        (
            ["--environment", "m:f", "--environment-settings", "3"],
            "--environment-settings: expected",
        ),
        (verifiers(), "of verifiers: command: Field required"),
        (verifiers(command=" "), "command: expected what vf-eval takes"),
        (
            verifiers(command="a", rollout_timeout_s=0, colour=1),
            "_s: Input should be greater than 0; colour:",
        ),
        (verifiers(command="a", python="/nowhere"), "expected one at 'python', got '/nowhere'"),
        ([*verifiers(command="a", python=sys.executable), "--eval-every", "2"], "needs 'eval_command'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_environments(parse(JobOptions, given))


def test_held_out_prompts_are_a_file_of_their_own(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).write_text('{"prompt": "' + name + '"}')
    given = ["--prompts", str(tmp_path / "train"), "--reward", "tests.app.jobs.test_options:no_reward"]
    given += ["--eval-every", "1"]
    with pytest.raises(ValueError, match="--eval-prompts"):
        load_environments(parse(JobOptions, given))
    learned, held_out = load_environments(
        parse(JobOptions, [*given, "--eval-prompts", str(tmp_path / "test")])
    )
    assert isinstance(learned, PromptFileTask) and isinstance(held_out, PromptFileTask)
    assert learned.problem(0).messages[0]["content"] == "train"
    assert held_out.problem(0).messages[0]["content"] == "test"


def no_reward(entry: object, answer: str) -> float:
    return 0.0


def test_held_out_tasks_of_verifiers_have_a_command_of_their_own() -> None:
    given = verifiers(command="a @ b", eval_command="c", python=sys.executable)
    learned, held_out = load_environments(parse(JobOptions, given))
    assert learned is held_out, "nothing is evaluated"
    learned, held_out = load_environments(parse(JobOptions, [*given, "--eval-every", "2"]))
    assert isinstance(learned, Verifiers) and isinstance(held_out, Verifiers)
    assert (learned.settings.arguments, held_out.settings.arguments) == (["a", "@", "b"], ["c"])
    assert learned.settings.python == held_out.settings.python == sys.executable
