from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

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


def test_help_has_the_programs_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Options, ["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "Counts to a number." in shown and "how far" in shown


def test_an_object_must_be_one() -> None:
    assert json_object('{"a": 1}', "--engine") == {"a": 1}
    with pytest.raises(ValueError, match=r"--engine: expected a JSON object, got '\[1\]'"):
        json_object("[1]", "--engine")
    with pytest.raises(ValueError, match=r"--engine: expected JSON, got '\{'"):
        json_object("{", "--engine")
