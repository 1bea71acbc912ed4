import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
import typer

import app.command.cli
import app.jobs.__main__
from app.client.program_options import LOCAL_URL, Url, json_object, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Counts to a number."""

    count: Annotated[int, typer.Option(min=1, help="how far")]
    url: Url = LOCAL_URL
    loud: Annotated[bool, typer.Option("--loud")] = False
    word: Annotated[list[str] | None, typer.Option()] = None

    def __post_init__(self) -> None:
        if self.count == 13:
            raise typer.BadParameter("--count: expected another number than 13")


def test_fields_are_options() -> None:
    assert parse(Options, ["--count", "3"]) == Options(count=3)
    given = ["--count", "3", "--url", "http://x", "--loud", "--word", "a", "--word", "b"]
    assert parse(Options, given) == Options(count=3, url="http://x", loud=True, word=["a", "b"])


def test_the_fleets_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_URL", "http://y")
    assert parse(Options, ["--count", "3"]).url == "http://y"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--count'"),
        (["--count", "0"], "Invalid value for '--count'"),
        (["--count", "13"], "--count: expected another number than 13"),
        (["--count", "3", "--quiet"], "No such option: --quiet"),
    ],
)
def test_a_wrong_option_ends_the_program_with_its_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Options, arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_object_must_be_one() -> None:
    assert json_object('{"a": 1}', "--engine") == {"a": 1}
    with pytest.raises(ValueError, match=r"--engine: expected a JSON object, got '\[1\]'"):
        json_object("[1]", "--engine")
    with pytest.raises(ValueError, match=r"--engine: expected JSON, got '\{'"):
        json_object("{", "--engine")


def test_a_file_has_options_by_their_names_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('count = 3\nurl = "http://x"\nloud = true\nword = ["a", "b c"]\n')
    expected = Options(count=3, url="http://x", loud=True, word=["a", "b c"])
    assert parse(Options, ["@", str(file)]) == expected
    assert parse(Options, ["--count", "4", "@", str(file)]) == replace(expected, count=4)
    file.write_text('count = 3\nword = "one"\n[url]\na = 1\n')
    assert parse(Options, ["@", str(file)]) == Options(count=3, url='{"a": 1}', word=["one"])
    file.write_text("count = 3\nword = []\n[url]\na = 2026-01-31\n")
    assert parse(Options, ["@", str(file)]) == Options(count=3, url='{"a": "2026-01-31"}', word=[""])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cuont = 3", r"run\.toml: unknown option 'cuont' \(did you mean 'count'\?\)"),
        ("zzz = 3", r"run\.toml: unknown option 'zzz'$"),
        ("count = ", r"run\.toml: expected TOML: Invalid value"),
        (b"\xff", r"run\.toml: expected TOML: 'utf-8' codec"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(content: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        parse(Options, ["@", str(file)])
    with pytest.raises(ValueError, match=r"@ : expected a TOML file that can be read"):
        parse(Options, ["@"])


@pytest.mark.parametrize("content", ["count = 3.5", 'count = "many"', "count = 0"])
def test_a_value_of_a_file_is_checked_as_an_option(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(SystemExit):
        parse(Options, ["@", str(tmp_path / "run.toml")])
    assert "Invalid value for '--count'" in capsys.readouterr().err


@pytest.mark.parametrize("program", [app.command.cli.main, app.jobs.__main__.run])
def test_a_terminal_that_lacks_a_character_gets_its_escape(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], object]
) -> None:
    """A job would end after the first step whose example has one."""
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, "ascii"))
    monkeypatch.setattr(sys, "argv", ["program", "--version"])
    with pytest.raises(SystemExit):
        program()
    print("reward 0.5 ± 0.1", flush=True)
    assert terminal.getvalue().endswith(b"reward 0.5 \\xb1 0.1\n")
