import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from app.command.cli import cli
from deployments.protocol.responses import RoundStatus
from tests.app.command.fake_http import JsonHandler, serving
from tests.app.http.fake_status import report, status

STATUS = asdict(status(3, ["replica-0"]))
ROUNDS = {"rounds": [asdict(report(1, 3))]}


class Fleet(JsonHandler):
    """Answers as a fleet would, and records the requests."""

    requests: list[tuple[str, str, str | None, Any]]
    states: Iterator[Any] = iter(())  # what `/fleet` answers, one after the other; then STATUS
    ended: Event  # of a publication

    def do_GET(self) -> None:
        self._answer(200, {"/fleet": next(self.states, STATUS), "/fleet/rounds": ROUNDS}[self.path])

    def do_POST(self) -> None:
        if self.path == "/fleet/rollback":
            self._answer(409, {"error": {"type": "conflict", "message": "a round is open", "detail": {}}})
        elif self.path == "/fleet/publish":
            Fleet.ended.wait(10)
            self._answer(200, asdict(report(4, 7)))
        elif self.path == "/fleet/scale":
            self._answer(200, STATUS["size"])
        else:
            self._answer(200, {"status": f"{self.path[1:]}d"})

    def _answer(self, code: int, body: Any) -> None:
        self.requests.append((self.command, self.path, self.headers.get("authorization"), self.body()))
        self.answer(code, body)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "s3cret")
    Fleet.requests, Fleet.states, Fleet.ended = [], iter(()), Event()
    with serving(Fleet) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(("command", "shown"), [("status", STATUS), ("rounds", ROUNDS)])
def test_the_response_is_printed(url: str, command: str, shown: object) -> None:
    result = CliRunner().invoke(cli, [command, "--url", url])
    assert (result.exit_code, result.stdout) == (0, json.dumps(shown, indent=2) + "\n")


@pytest.mark.parametrize(("command", "state"), [("pause", "paused"), ("resume", "resumed")])
def test_control_commands_carry_the_token(url: str, command: str, state: str) -> None:
    result = CliRunner().invoke(cli, [command], env={"SLIPSTREAM_URL": url})
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"status": state})
    assert Fleet.requests == [("POST", f"/{command}", "Bearer s3cret", None)]


def reading(sent_mib: int, phase: str = "open") -> Any:
    current = RoundStatus(
        round_id=4,
        version=7,
        label=None,
        phase=phase,
        age_s=1.0,
        participants=("replica-0",),
        file_bytes=10 << 20,
        sent_bytes=sent_mib << 20,
    )
    return STATUS | {"round": asdict(current)}


@pytest.mark.slow
def test_a_directory_is_published_with_a_progress_bar(url: str, tmp_path: Path) -> None:
    def states() -> Iterator[Any]:
        yield STATUS
        yield from (reading(0), reading(4), reading(10), reading(10, "committing"))
        Fleet.ended.set()

    Fleet.states = states()
    result = CliRunner().invoke(cli, ["publish", str(tmp_path / "a" / ".."), "--label", "s7", "--url", url])
    assert (result.exit_code, json.loads(result.stdout)) == (0, json.loads(json.dumps(asdict(report(4, 7)))))
    posted = [each for each in Fleet.requests if each[0] == "POST"]
    body = {"path": str(tmp_path), "label": "s7"}
    assert posted == [("POST", "/fleet/publish", "Bearer s3cret", body)]
    assert "version 7" in result.stderr


@pytest.mark.parametrize(("argument", "sent"), [("3", 3), ("auto", "auto")])
def test_the_number_of_replicas_is_sent(url: str, argument: str, sent: object) -> None:
    result = CliRunner().invoke(cli, ["scale", argument, "--url", url])
    assert (result.exit_code, json.loads(result.stdout)) == (0, STATUS["size"])
    assert Fleet.requests == [("POST", "/fleet/scale", "Bearer s3cret", {"replicas": sent})]


def test_a_number_of_replicas_that_is_none_is_refused_here() -> None:
    result = CliRunner().invoke(cli, ["scale", "many"])
    assert result.exit_code == 2 and "expected a number or 'auto', got 'many'" in result.stderr


def test_a_refusal_is_the_fleets_own_explanation(url: str) -> None:
    result = CliRunner().invoke(cli, ["rollback", "7", "--url", url])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "version 7: replicas read and stage",  # it may take long
        "slipstream: a round is open (409)",
    ]
    assert Fleet.requests[0][3] == {"version": 7}


def test_a_fleet_that_does_not_answer_is_named() -> None:
    result = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("slipstream: no fleet answers at http://127.0.0.1:1 (")
    assert result.stderr.endswith("): --url or SLIPSTREAM_URL gives its address\n")


def test_the_jobs_options_are_passed_on_unread() -> None:
    environment = {"SLIPSTREAM_URL": "http://127.0.0.1:1"}
    result = CliRunner().invoke(cli, ["rl", "--steps", "3", "--no-such-option", "x"], env=environment)
    assert result.exit_code == 1, "without a fleet; no complaint about options"
    assert "no fleet answers at http://127.0.0.1:1: start one" in result.stderr
