import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from app.client import calls
from app.client.announcement import announced
from app.client.connection import Call, FleetClient, FleetError
from app.command import asking
from app.command.cli import cli
from deployments.protocol.responses import FleetLoad, ReplicaLoad, RoundStatus
from tests.app.http.fake_status import report, status
from tests.fake_http import JsonHandler, answering, serving
from tests.tiny_models import save_tiny_llama

STATUS = asdict(status(3, ["replica-0"]))
LOAD = FleetLoad(
    at=1.0,
    replicas={"replica-0": ReplicaLoad(running=7, waiting=0, kv_cache_use=0.1, generated_tokens=5)},
    dashboard=None,
)
ROUNDS = {"rounds": [asdict(report(1, 3))]}


class Fleet(JsonHandler):
    """Answers as a fleet would, and records the requests."""

    requests: list[tuple[str, str, str | None, Any]]
    rounds: Any = ROUNDS
    load: tuple[int, Any]
    states: Iterator[Any] = iter(())  # what `/fleet` answers, one after the other; then STATUS
    ended: Event  # of a publication

    def do_GET(self) -> None:
        answers = {"/fleet/rounds": self.rounds, "/fleet/adapters": {"adapters": []}}
        if self.path == "/fleet/load":
            self.answer(*self.load)
        else:
            self._answer(200, answers[self.path] if self.path in answers else next(self.states, STATUS))

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
    Fleet.rounds, Fleet.load = ROUNDS, (200, asdict(LOAD))
    with serving(Fleet) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("command", "shown"), [("status", STATUS), ("rounds", ROUNDS), ("adapters", {"adapters": []})]
)
def test_programs_get_the_response_itself(url: str, command: str, shown: object) -> None:
    result = CliRunner().invoke(cli, [command, "--json", "--url", url])
    assert (result.exit_code, result.stdout) == (0, json.dumps(shown, indent=2) + "\n")


@pytest.mark.parametrize(
    ("command", "shown"), [("status", "1 of 1 replicas serve"), ("rounds", "committed"), ("adapters", "no ")]
)
def test_people_get_a_table(url: str, command: str, shown: str) -> None:
    result = CliRunner().invoke(cli, [command, "--url", url])
    assert result.exit_code == 0 and shown in result.stdout and "{" not in result.stdout


def test_the_load_of_the_engines_is_shown_where_the_fleet_knows_it(url: str) -> None:
    lines = CliRunner().invoke(cli, ["status", "--url", url]).stdout.splitlines()
    assert "running" in lines[-2] and "7" in lines[-1].split()
    Fleet.load = (503, {"error": {"type": "fleet_unavailable", "message": "starts"}})
    assert "running" not in CliRunner().invoke(cli, ["status", "--url", url]).stdout


@pytest.mark.parametrize(("options", "shown"), [((), 20), (("--last", "3"), 3), (("--json",), 25)])
def test_the_newest_rounds_are_shown(url: str, options: Sequence[str], shown: int) -> None:
    Fleet.rounds = {"rounds": [asdict(report(number, number)) for number in range(1, 26)]}
    text = CliRunner().invoke(cli, ["rounds", *options, "--url", url]).stdout
    assert len(re.findall(r"\bcommitted\b", text)) == shown and "25" in text


def test_watching_goes_on_while_the_fleet_restarts(url: str) -> None:
    answers = iter(["version 1", FleetError("no fleet answers"), "version 2"])

    def table(fleet: FleetClient) -> str:
        if isinstance(answer := next(answers), FleetError):
            raise answer
        return answer

    with FleetClient.connect(url) as fleet:
        shown = [str(frame) for frame in asking.frames(url, fleet, table, range(3))]
    assert shown == [
        "version 1",
        "no fleet answers: start a fleet, or give its address with --url or SLIPSTREAM_URL",
        "version 2",
    ]


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (404, {"detail": "Not Found"}, "GET /fleet: 404"),
        (
            404,
            {"error": {"type": "Not Found", "message": "no such route"}},
            "GET /fleet: 404: no such route",
        ),
        (200, {"hello": "world"}, "GET /fleet: the answer cannot be read"),
        (502, "<h1>Bad Gateway</h1>", "GET /fleet: 502"),
    ],
)
def test_an_address_that_is_no_slipstream_is_said_so(status: int, content: Any, said: str) -> None:
    with answering(status, content) as url:
        result = CliRunner().invoke(cli, ["status", "--url", url])
    start = f"slipstream: expected a Slipstream fleet of this version at {url}, got {said}"
    assert result.exit_code == 1 and result.stderr.startswith(start) and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("token", "found"), [(None, "none"), ("wrong", "another one")])
def test_a_token_that_is_missing_or_wrong_says_where_it_is_expected(token: str | None, found: str) -> None:
    refused = {"error": {"type": "unauthorized", "message": "/fleet needs the operator's token"}}
    with answering(401, refused) as url:
        environment = {"SLIPSTREAM_TOKEN": token, "SLIPSTREAM_URL": url}
        result = CliRunner().invoke(cli, ["status"], env=environment)
    assert result.stderr == (
        "slipstream: /fleet needs the operator's token (401): this command expects it in SLIPSTREAM_TOKEN or "
        f"in the file SLIPSTREAM_TOKEN_FILE, and found {found}\n"
    )


def test_a_fleet_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(cli, ["status", "--url", url])
    assert result.stderr.startswith(f"slipstream: no server answers at {url} (timed out): start a fleet")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8o00", "localhost:8000"])
def test_an_address_that_is_none_is_refused_in_a_sentence(address: str) -> None:
    result = CliRunner().invoke(cli, ["status", "--url", address])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("slipstream: ")


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"slipstream {metadata.version('slipstream-rl')}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "needed", "usage"),
    [([], set(), "Usage: "), (["rl"], {"pydantic"}, "Usage: slipstream rl [OPTIONS]")],
)
def test_help_imports_nothing_that_it_does_not_need(command: list[str], needed: set[str], usage: str) -> None:
    heavy = {"rich", "httpx", "pydantic", "yaml", "numpy", "torch", "ray", "vllm"} - needed
    program = (
        "import sys; from typer.testing import CliRunner; from app.command.cli import cli\n"
        f"assert '{usage}' in CliRunner().invoke(cli, {[*command, '--help']}).stdout\n"
        f"print({heavy} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


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


def test_in_a_terminal_a_round_is_a_table(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fleet.ended.set()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    asking.run(url, calls.publish_directory("/a", None))
    shown = capsys.readouterr().out
    assert "committed" in shown and "{" not in shown


@pytest.mark.slow
def test_a_directory_is_published_and_the_rounds_progress_is_shown(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PROGRESS_S", 30.0)
    monkeypatch.setattr(asking, "announced", partial(announced, quiet_s=0.01))

    def states() -> Iterator[Any]:
        yield from (STATUS, reading(4), reading(10, "committing"))
        Fleet.ended.set()

    Fleet.states = states()
    result = CliRunner().invoke(cli, ["publish", str(tmp_path / "a" / ".."), "--label", "s7", "--url", url])
    assert (result.exit_code, json.loads(result.stdout)) == (0, json.loads(json.dumps(asdict(report(4, 7)))))
    posted = [each for each in Fleet.requests if each[0] == "POST"]
    body = {"path": str(tmp_path), "label": "s7"}
    assert posted == [("POST", "/fleet/publish", "Bearer s3cret", body)]
    assert ": open, 4.2 MB of 10.5 MB, " in result.stderr, result.stderr
    assert ": committing, 10.5 MB of 10.5 MB, " in result.stderr


def test_what_is_uploaded_is_published_by_its_url(url: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    parent = f"file://{tmp_path}/bucket"
    result = CliRunner().invoke(cli, ["upload", str(checkpoint), parent])
    assert result.exit_code == 1
    assert result.stderr == (f"slipstream: {checkpoint} must have *.safetensors files, and has none\n")
    save_file({"w": np.arange(6.0)}, checkpoint / "model.safetensors")
    result = CliRunner().invoke(cli, ["upload", str(checkpoint), parent])
    assert (result.exit_code, result.stdout) == (0, f"{parent}/checkpoint-4\n")
    assert CliRunner().invoke(cli, ["publish", result.stdout.strip(), "--url", url]).exit_code == 0
    posted = [each for each in Fleet.requests if each[0] == "POST"]
    assert posted == [("POST", "/fleet/publish", "Bearer s3cret", {"path": f"{parent}/checkpoint-4"})]


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
        "rolling back to version 7",
        "slipstream: a round is open (409)",
    ]
    assert Fleet.requests[0][3] == {"version": 7}


def test_a_command_that_is_interrupted_says_that_the_fleet_may_go_on(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(body: bytes, headers: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        asking.run(url, Call(method="POST", path="/pause", read=interrupted))
    assert ended.value.exit_code == 130 and "the fleet may still do it" in capsys.readouterr().err


def test_a_fleet_that_does_not_answer_is_named() -> None:
    result = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("slipstream: no server answers at http://127.0.0.1:1 (")
    assert result.stderr.endswith("): start a fleet, or give its address with --url or SLIPSTREAM_URL\n")


def test_the_jobs_options_are_read_before_the_fleet_is_asked() -> None:
    environment = {"SLIPSTREAM_URL": "http://127.0.0.1:1"}
    result = CliRunner().invoke(cli, ["rl", "--steps", "3"], env=environment)
    assert result.exit_code == 1 and "no server answers at http://127.0.0.1:1 (" in result.stderr
    result = CliRunner().invoke(cli, ["rl", "--no-such-option", "x"], env=environment)
    assert result.exit_code == 2 and "No such option: --no-such-option" in result.stderr


@pytest.mark.slow
def test_a_new_drafter_is_written_once(tmp_path: Path) -> None:
    model, head = save_tiny_llama(tmp_path / "model", seed=0), tmp_path / "head"
    command = ["drafter", "new", str(model), str(head), "--draft-vocabulary", "16"]
    first, again = (CliRunner().invoke(cli, command) for _ in range(2))
    assert (first.exit_code, again.exit_code) == (0, 1) and str(head) in first.stdout
    assert again.stderr == f"slipstream: expected a directory that does not exist, got {head}\n"
    assert json.loads((head / "config.json").read_text())["draft_vocab_size"] == 16
