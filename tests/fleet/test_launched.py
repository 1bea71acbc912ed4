"""A fleet as `make serve` starts it: a Ray of its own, HAProxy in front, ended by Ctrl-C."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from app.command.ports import free_ports
from tests.environment import users_environment
from tests.fleet.losing import kill_a_replica, members, process_of, wait_for_another
from tests.fleet.session_fleet import MODEL, Fleet
from tests.fleet.talk import PROMPT, body, complete, train_and_publish
from tests.tiny_models import save_tiny_llama

APPLICATION = "launched"
pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Fleet]:
    checkpoint = save_tiny_llama(tmp_path / "model", seed=1)
    http_port, dashboard_port = free_ports(2)
    args = {
        "model": str(checkpoint),
        "served_model_name": MODEL,
        "state_dir": str(tmp_path / "state"),
        "engine": {
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
            "num_replicas": 1,
            "load_format": "dummy",  # noise, until the trainer has published
        },
        "trainer": {"optimizer": {"learning_rate": 0.02}},
    }
    application = {"name": APPLICATION, "route_prefix": "/", "import_path": "app.main:build", "args": args}
    document = {"http_options": {"host": "127.0.0.1", "port": http_port}, "applications": [application]}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(document))
    output = tmp_path / "output"
    command = [
        sys.executable,
        "-m",
        "app.command.cli",
        "serve",
        "--config",
        str(file),
        "--dashboard-port",
        str(dashboard_port),
    ]
    with output.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=users_environment())
    try:
        deadline = time.monotonic() + 400  # an engine alone took 200 s on a slow host
        while "Slipstream is up" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)
        url = f"http://127.0.0.1:{http_port}"
        yield Fleet(url=url, checkpoint=checkpoint, store=tmp_path / "state" / "store")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, output.read_text()
    assert "Traceback" not in output.read_text()


def lasting(client: httpx.Client) -> float:
    """The seconds between the first and the last piece of a stream."""
    pieces = []
    with client.stream("POST", "/v1/completions", json=body(PROMPT, 64, stream=True)) as answer:
        for piece in answer.iter_raw():
            pieces.append((time.monotonic(), piece))
    assert len(pieces) > 10 and b"[DONE]" in pieces[-1][1]
    return pieces[-1][0] - pieces[0][0]


def test_it_answers_streams_learns_and_replaces_what_is_lost(launched: Fleet) -> None:
    with launched.client() as client:
        before = complete(client, PROMPT, 24)
        assert train_and_publish(client) == 1
        after = complete(client, PROMPT, 24)
        assert (before.version, after.version) == (0, 1) and before.token_ids != after.token_ids
        # Not each one: on two cores vLLM by itself delivered 8 of 200 such streams in one piece.
        assert any(lasting(client) > 0.01 for _ in range(8)), "streams must not arrive in one piece"
        with client.stream("POST", "/v1/completions", json=body(PROMPT, 900, stream=True)) as answer:
            next(answer.iter_raw())
        time.sleep(1.0)  # the rest of it would take several
        assert client.post("/abort_requests", json={}).json()["aborted"] == 0
        assert client.get("/nothing/here").json()["error"]["type"] == "not_found"
        before_loss = members(client)
        while client.get("/fleet").json()["stored_version"] != 1:
            time.sleep(0.1)
        kill_a_replica(APPLICATION)
        wait_for_another(client, before_loss)
        again = complete(client, PROMPT, 24)
        assert (again.version, again.token_ids) == (1, after.token_ids), (
            "not the noise that the first one started with"
        )
        with client.stream("GET", "/fleet/events") as events:
            assert next(line for line in events.iter_lines() if line.startswith("data:"))
        while_its_router_stands_still_nobody_answers_for(launched)
        assert complete(client, PROMPT, 24).token_ids == after.token_ids


def while_its_router_stands_still_nobody_answers_for(fleet: Fleet) -> None:
    """Ray gives the fallback proxy of every cluster the port 8500, and proxies share ports: another cluster's
    proxy would answer."""
    router = process_of("router", APPLICATION)
    answers: list[str] = []
    with somebody_elses_proxy(8500):
        router.suspend()
        try:
            end = time.monotonic() + 20  # HAProxy notices after two checks, 5 s apart
            while time.monotonic() < end:
                with suppress(httpx.TimeoutException):
                    answers.append(httpx.get(f"{fleet.url}/fleet", timeout=1).text)
        finally:
            router.resume()
    assert not [text for text in answers if "somebody else" in text]


@contextmanager
def somebody_elses_proxy(port: int) -> Iterator[None]:
    """A server that shares its port with others, as Serve's proxies do."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"somebody else")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Answer, bind_and_activate=False)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.server_bind()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
