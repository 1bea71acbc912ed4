import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.command.cluster import (
    ClusterError,
    LocalCluster,
    require_free_port,
)
from app.command.launch import WRITE_S, await_writes, changes, environment, read_status, why_not_started
from app.command.runs import MARK, marked_processes
from app.settings.config import parse_config
from deployments.protocol.errors import JournalError
from deployments.weights.store.versions import Store
from tests.environment import users_environment
from tests.free_ports import free_ports


def test_variables_that_the_user_has_set_keep_their_values() -> None:
    chosen = environment(parse_config({"model": "smollm2-135m"}), {"RAY_AUTH_MODE": "token", "HOME": "/h"})
    assert chosen["RAY_AUTH_MODE"] == "token"
    assert chosen["HOME"] == "/h"
    assert chosen["HF_HUB_OFFLINE"] == "1"


def test_the_hub_is_reachable_for_its_own_models() -> None:
    assert "HF_HUB_OFFLINE" not in environment(parse_config({"model": "Qwen/Qwen3-8B"}), {})


def test_a_wrong_setting_that_serve_reports_has_no_stack() -> None:
    stack = (
        "Deploying app 'slipstream' failed with exception:\nTraceback (most recent call last):\n"
        '  File "main.py", line 71, in build\n    check_gpus(args, hosts)\n'
    )
    wrong = f"{stack}app.settings.section.ConfigError: expected a Ray cluster with at least 3 GPUs, got one"
    assert why_not_started(wrong) == "expected a Ray cluster with at least 3 GPUs, got one"
    used = f"{stack}{JournalError.__module__}.JournalError: /s: another controller uses it"
    assert why_not_started(used) == "/s: another controller uses it"
    slow = "Deployment 'rollout' in application 'slipstream' has 2 replicas that have taken more than 30s to "
    others = f"{slow}initialize.\nThis may be caused by a slow __init__.\n{slow}be scheduled."
    assert why_not_started(f"{used}\n{others}") == "/s: another controller uses it"
    assert (
        why_not_started(f"{stack}ValueError: 'model': expected one, got 'x'")
        == "'model': expected one, got 'x'"
    )
    fault = f"{stack}RuntimeError: no weights here"
    assert why_not_started(fault) == fault


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} .the test. is taken"):
            require_free_port(port, "the test")
    require_free_port(port, "the test")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "[::1]", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_not_called_taken(host: str) -> None:
    with pytest.raises(
        ClusterError, match=f"port 8000 .the test. cannot be opened on {re.escape(host)}: expec"
    ):
        require_free_port(8000, "the test", host)


REFUSED = (400, "1 validation error for ServeDeploySchema")
NOT_UP = (
    500,
    'Traceback (most recent call last):\n  File "api.py", line 218\n    return fut.result()\n'
    "ray.exceptions.ActorDiedError: The actor died.\n\tclass_name: HAProxyManager",
)


def cluster_that_answers(*answers: tuple[int, str]) -> tuple[LocalCluster, list[httpx.Request]]:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        status, text = answers[min(len(asked), len(answers)) - 1]
        return httpx.Response(status, text=text)

    cluster = LocalCluster(dashboard_port=1, environment={})
    shutil.rmtree(cluster.directory)
    cluster._client = httpx.Client(base_url="http://serve", transport=httpx.MockTransport(answer))
    cluster.require_alive = lambda: None  # type: ignore[method-assign]
    return cluster, asked


@pytest.mark.slow
def test_serve_is_asked_again_while_its_proxy_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, asked = cluster_that_answers(NOT_UP, (200, ""))
    cluster.deploy({})
    assert len(asked) == 2
    assert capsys.readouterr().out == (
        "Serve did not start: ray.exceptions.ActorDiedError: The actor died. Retrying\n"
    )


def test_a_serve_that_never_starts_is_named_without_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.command.cluster._START_TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match=r"^Serve did not start within 0 s: ray.exceptions.ActorDiedError"):
        cluster_that_answers(NOT_UP)[0].deploy({})


def test_a_refused_configuration_is_not_retried() -> None:
    cluster, asked = cluster_that_answers(REFUSED)
    with pytest.raises(ClusterError, match=r"^Serve refused the configuration: 1 validation error"):
        cluster.deploy({})
    assert len(asked) == 1


def test_marked_processes_are_found_and_only_they() -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    marked = subprocess.Popen(sleep, env={**os.environ, MARK: "mine"}, stdout=subprocess.PIPE)
    other = subprocess.Popen(sleep, env={**os.environ, MARK: "mine-too"}, stdout=subprocess.PIPE)
    try:
        for process in (marked, other):  # /proc shows the new environment once the program runs
            assert process.stdout is not None
            process.stdout.readline()
        assert list(marked_processes("mine")) == [marked.pid]
    finally:
        for process in (marked, other):
            process.kill()
            process.communicate()


@pytest.mark.serve
@pytest.mark.timeout(700)  # Ray and Serve start beside four engines that do
def test_a_fleet_that_cannot_start_says_why_and_leaves_no_process_behind(tmp_path: Path) -> None:
    """`tests/chaos/launching.py` looks for the same at the end of each fleet."""
    (tmp_path / "config.json").write_text("{}")  # a model as far as the launcher is concerned
    http_port, dashboard_port = free_ports(2)
    toy = {
        "name": "toy",
        "import_path": "tests.app.toy_application:build",
        "args": {"model": str(tmp_path), "state_dir": str(tmp_path / "state")},
    }
    document = {"http_options": {"host": "127.0.0.1", "port": http_port}, "applications": [toy]}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(document))
    arguments = ["--config", str(tmp_path / "serve.yaml"), "--dashboard-port", str(dashboard_port)]
    environment = users_environment(PYTHONPATH=str(Path.cwd()), TMPDIR=str(tmp_path))
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.command.cli", "serve", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        assert process.wait(450) == 1
    finally:
        process.terminate()
        process.wait(120)
    text = output.read_text()
    assert "the fleet could not be started" in text
    assert "RuntimeError: no weights here" in text
    (logs,) = re.findall(r"^Logs: (\S+)", text, re.MULTILINE)
    assert f"logs are in {logs}" in text and Path(logs).is_dir()
    assert not list(Path(logs).parent.glob("sockets"))
    assert list(marked_processes((tmp_path / "mark").read_text())) == []


def details(status: str, ready: int, message: str = "") -> dict[str, Any]:
    replicas = [{"state": "RUNNING"}] * ready + [{"state": "STARTING"}] * (2 - ready)
    rollout = {"replicas": replicas, "target_num_replicas": 2, "message": message}
    application = {"status": status, "message": message, "deployments": {"Rollout": rollout}}
    return {"applications": {"slipstream": application}}


def test_only_deployments_whose_readiness_changed_are_listed() -> None:
    first, second = (read_status(details("DEPLOYING", ready), "slipstream") for ready in (1, 2))
    assert changes(None, first) == ["Rollout: 1 of 2 ready"]
    assert changes(first, first) == []
    assert changes(first, second) == ["Rollout: 2 of 2 ready"]


def test_a_message_of_application_and_deployment_is_shown_once() -> None:
    assert read_status(details("DEPLOY_FAILED", 0, "no weights"), "slipstream").message == "no weights"


def test_a_stop_waits_for_a_version_that_a_living_process_writes(tmp_path: Path) -> None:
    store, said, paused = Store(tmp_path), list[str](), 0
    (tmp_path / ".v00000011.a1b2c3d4.partial").mkdir()  # a crash left it
    await_writes(store, said.append)
    assert not said
    with ExitStack() as stack:
        directory = stack.enter_context(store.writing(12))
        (directory / "model.safetensors").write_bytes(bytes(60_000_000))
        gone = directory / "gone since it was listed"
        gone.symlink_to("nowhere")

        def pause(seconds: float) -> None:
            nonlocal paused
            paused += 1
            gone.unlink(missing_ok=True)
            if paused == 50:
                stack.close()
            if paused == 51:  # its writer had a second version
                stack.enter_context(store.writing(13))
            if paused == 60:
                stack.close()

        await_writes(store, said.append, pause)
    assert paused == 61 and said[0] == "v00000012 (0.1 GB) is being written, at most 300 s more"
    assert store.list() == [12, 13]


def test_a_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    pauses, said = list[float](), list[str]()
    with Store(tmp_path).writing(12):
        await_writes(Store(tmp_path), said.append, pauses.append)
    assert sum(pauses) == WRITE_S
