import os
import sys

import pytest

from app.command.cluster import ClusterError, LocalCluster
from tests.free_ports import free_ports

GIVES_UP = [
    "print('The current node timed out during startup.'); raise SystemExit(1)",
    "print('RuntimeError: Timed out waiting for node info for node_id=24.'); raise SystemExit(1)",
    "print('RaySystemError: System error: Failed to connect to GCS. Please check'); raise SystemExit(1)",
]
FAILS = "print('no such option'); raise SystemExit(2)"
SERVES = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Dashboard).serve_forever()
"""


class Head(LocalCluster):
    """A cluster whose head node is a script, another one for each start."""

    def __init__(self, *scripts: str) -> None:
        (self.port,) = free_ports(1)
        super().__init__(dashboard_port=self.port, environment=dict(os.environ))
        self._scripts = list(scripts)

    def _command(self) -> list[str]:
        return [sys.executable, "-c", self._scripts.pop(0), str(self.port)]


@pytest.mark.slow
@pytest.mark.parametrize("gives_up", GIVES_UP)
def test_a_node_that_ray_gave_up_is_started_again(gives_up: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Head(gives_up, SERVES)
    try:
        cluster.start()
    finally:
        cluster.stop()
    assert capsys.readouterr().out == "Ray took more than its own 30 s to start: restarting it\n"


@pytest.mark.slow
def test_a_node_that_hangs_is_started_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.command.cluster._HANGS_S", 2.0)
    cluster = Head("import time; time.sleep(600)", SERVES)
    try:
        cluster.start()
    finally:
        cluster.stop()
    assert capsys.readouterr().out == "Ray does not respond: restarting it\n"


def test_any_other_end_is_an_error_at_once() -> None:
    cluster = Head(FAILS, SERVES)
    try:
        with pytest.raises(ClusterError, match=r"Ray has stopped .*\nno such option"):
            cluster.start()
    finally:
        cluster.stop()
