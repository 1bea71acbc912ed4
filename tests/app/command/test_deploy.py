"""Another configuration for a running fleet, with a dashboard that records what it is sent."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from app.command.deploy import deploy
from app.command.serve_file import read_serve_file


class Dashboard(BaseHTTPRequestHandler):
    """Serve's REST API with one application."""

    deployed: dict[str, Any] | None

    def do_GET(self) -> None:
        running = {} if self.deployed is None else {"slipstream": {"deployed_app_config": self.deployed}}
        self._answer({"applications": running})

    def do_PUT(self) -> None:
        length = int(self.headers["content-length"])
        type(self).deployed = json.loads(self.rfile.read(length))["applications"][0]
        self._answer({})

    def _answer(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    Dashboard.deployed = None
    with HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)


def file(directory: Path, **settings: Any) -> Path:
    args = {"model": "m", "state_dir": str(directory), **settings}
    path = directory / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "slipstream", "args": args}]}))
    return path


def test_it_says_what_restarts(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    Dashboard.deployed = read_serve_file(file(tmp_path)).document["applications"][0]
    assert deploy(file(tmp_path, weights={"commit": "rolling"}), port) == 0
    assert capsys.readouterr().out == "Deployed; nothing restarts\n"
    assert deploy(file(tmp_path, engine={"seed": 3}), port) == 0
    assert capsys.readouterr().out == (
        "Deployed; the fleet restarts, replica after replica, because of: engine\n"
    )


def test_there_must_be_a_fleet(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(file(tmp_path), port) == 1
    assert "no application 'slipstream' runs at http://127.0.0.1:" in capsys.readouterr().err
    assert deploy(file(tmp_path), 1) == 1
    assert "no fleet answers at http://127.0.0.1:1 (" in capsys.readouterr().err
