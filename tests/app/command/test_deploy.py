"""Another configuration for a running fleet, with a dashboard that records what it is sent."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from app.command.deploy import ServeFile, deploy, read_serve_file
from app.settings.section import ConfigError


def read(directory: Path, document: Any) -> ServeFile:
    path = directory / "serve_config.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return read_serve_file(path)


def application(**arguments: Any) -> dict[str, Any]:
    return {"name": "slipstream", "import_path": "app.main:build", "args": {"model": "m", **arguments}}


def test_the_default_file_says_where_it_listens() -> None:
    file = read_serve_file(Path("serve_config.yaml"))
    assert (file.url, file.application) == ("http://127.0.0.1:8000", "slipstream")
    assert file.document["applications"][0]["import_path"] == "app.main:build"


def test_serve_is_sent_an_absolute_state_directory(tmp_path: Path) -> None:
    file = read(tmp_path, {"applications": [application(state_dir="state")]})
    assert file.document["applications"][0]["args"]["state_dir"] == str(Path("state").absolute())


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("a: [", "expected YAML"),
        ("- 1", "expected one entry under 'applications', got none"),
        ({"applications": [application(), application()]}, "got 2"),
        ({"applications": [application(modle="x")]}, r"unknown setting 'modle' \(did you mean 'model'\?\)"),
        (
            {"http_options": {"host": "0.0.0.0"}, "applications": [application()]},
            r"'http_options.host' is '0.0.0.0', .*expected a token in SLIPSTREAM_TOKEN",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Any, complaint: str
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, document)


def test_a_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_serve_file(tmp_path / "none.yaml")


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


def test_deploy_names_the_settings_that_restart_the_fleet(
    tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
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
