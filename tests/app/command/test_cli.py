import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from app.command.cli import cli


class Fleet(BaseHTTPRequestHandler):
    """Answers as a fleet would, and remembers what it was asked."""

    asked: list[tuple[str, str, str | None, Any]]

    def do_GET(self) -> None:
        self._answer(200, {"version": 3})

    def do_POST(self) -> None:
        if self.path == "/fleet/rollback":
            self._answer(409, {"error": {"type": "conflict", "message": "a round is open", "detail": {}}})
        else:
            self._answer(200, {"status": "paused"})

    def _answer(self, status: int, body: Any) -> None:
        length = int(self.headers.get("content-length", 0))
        sent = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, self.headers.get("authorization"), sent))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "s3cret")
    Fleet.asked = []
    with HTTPServer(("127.0.0.1", 0), Fleet) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def test_status_prints_the_fleet(url: str) -> None:
    result = CliRunner().invoke(cli, ["status", "--url", url])
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"version": 3})


def test_control_commands_carry_the_token(url: str) -> None:
    assert CliRunner().invoke(cli, ["pause", "--url", url]).exit_code == 0
    assert Fleet.asked == [("POST", "/pause", "Bearer s3cret", None)]


def test_a_refusal_is_the_fleets_own_sentence(url: str) -> None:
    result = CliRunner().invoke(cli, ["rollback", "7", "--url", url])
    assert result.exit_code == 1
    assert "slipstream: a round is open (409)" in result.stderr
    assert Fleet.asked[0][3] == {"version": 7}


def test_no_fleet_is_a_sentence() -> None:
    result = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no fleet answers" in result.stderr
