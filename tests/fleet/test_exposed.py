"""A fleet that other hosts could reach does not start without a token, however it is started."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest
import yaml

from app.command.ports import free_ports
from tests.environment import users_environment

REASON = "which other hosts can reach: expected a token in SLIPSTREAM_TOKEN"
RAY_SLOW = "timed out during startup"  # Ray gives a node 30 s, whatever else the machine does
pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


def environment() -> dict[str, str]:
    return users_environment(
        RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_ENABLE_HA_PROXY="1", RAY_worker_niceness="0"
    )


@pytest.mark.parametrize("security", [{}, {"host": "127.0.0.1"}])
def test_serve_run_refuses_a_file_that_opens_the_fleet(tmp_path: Path, security: dict[str, str]) -> None:
    (port,) = free_ports(1)
    args = {"model": str(tmp_path), "state_dir": str(tmp_path / "state"), "security": security}
    application = {"name": "open", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    http = {"host": "0.0.0.0", "port": port}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    output = tmp_path / "output"
    deadline = time.monotonic() + 400
    process = start(command, output)
    try:
        while REASON not in output.read_text():
            if process.poll() is not None and RAY_SLOW in output.read_text():
                process = start(command, output)
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)
        assert "'http_options.host' is '0.0.0.0'" in output.read_text()
        with contextlib.suppress(httpx.TransportError):  # nobody listens
            assert httpx.post(f"http://127.0.0.1:{port}/pause").status_code >= 400
    finally:
        process.terminate()
        process.wait(60)


def start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("w") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )


SCRIPT = """
    import os, ray
    from ray import serve
    from app.http.auth import Tokens
    from app.http.ingress import Ingress
    from app.http.serve_address import listening_host
    from app.main import build
    from app.settings.config import parse_config
    from deployments.router.limits import RouterLimits

    ray.init(address="local", include_dashboard=False, num_cpus=1, configure_logging=False)
    assert listening_host() is None
    serve.start(http_options={"host": "0.0.0.0", "port": int(os.environ["PORT"])})
    assert listening_host() == "0.0.0.0"
    config = parse_config({"model": os.environ["MODEL"], "state_dir": os.environ["MODEL"] + "/state"})
    try:
        build(config)
    except ValueError as error:
        print("BUILD", error)

    limits = RouterLimits(
        max_in_flight=1, max_body_bytes=1, max_sequences=1,
        retry_after_s=1, find_replica_timeout_s=1, weight_timeout_s=1, load_factor=1.25, prefix_affinity=True,
    )
    # As if it had been built before Serve was started.
    router = serve.deployment(serve.ingress()(Ingress), name="router", max_constructor_retry_count=1)
    try:
        serve.run(router.bind(None, None, None, limits, Tokens(), False), name="late")
    except RuntimeError as error:
        print("RUN", serve.status().applications["late"].deployments["router"].message)
    serve.shutdown()
    serve.start(proxy_location="Disabled")
    assert listening_host() is None
    serve.shutdown()
    ray.shutdown()
"""


def test_a_serve_that_runs_already_is_asked_and_so_is_one_that_started_later(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=environment() | {"PORT": str(port), "MODEL": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = ran.stdout + ran.stderr[-3000:]
    assert ran.returncode == 0, said
    assert "BUILD 'http_options.host' is '0.0.0.0'" in ran.stdout and REASON in ran.stdout, said
    assert "RUN" in ran.stdout and "Serve listens on '0.0.0.0', " + REASON in ran.stdout, said
