"""Starts the fleet in the foreground: `slipstream serve --config serve_config.yaml`.

    check the file ─► prepare the model ─► Ray ─► Serve ─► "Slipstream is up"
                                                    │
                          Ctrl-C, SIGTERM, SIGHUP, a failed start, Ray's exit
                                                    ▼
                             Serve shuts down ─► Ray stops ─► no process is left, no name in /dev/shm

Serve's shutdown takes half a minute at most; then a version that is being written to the store is waited for.
A second Ctrl-C skips both.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from app.client.announcement import QUIET_S, announced, tell
from app.command import doctor
from app.command.cluster import ClusterError, LocalCluster, without_frames
from app.command.deploy import ServeFile, read_serve_file
from app.command.machine import NotEnough
from app.command.runs import logs_of
from app.settings.config import AppConfig
from app.settings.models import is_offline
from app.settings.section import ConfigError
from deployments.host import tracing
from deployments.host.shared_memory import remove_orphans
from deployments.protocol.errors import JournalError
from deployments.weights.store.versions import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationStatus:
    """One application, and how many replicas of its deployments are ready."""

    status: str  # Serve's
    message: str
    deployments: Mapping[str, str] = field(default_factory=dict)  # name -> "1 of 2 ready"


def read_status(details: Mapping[str, Any], application: str) -> ApplicationStatus:
    """The status of one application in Serve's REST API (GET /api/serve/applications/)."""
    found = details.get("applications", {}).get(application)
    if found is None:
        return ApplicationStatus(status="NOT_STARTED", message="")
    deployments = {
        name: _readiness(deployment) for name, deployment in sorted(found.get("deployments", {}).items())
    }
    messages = [found.get("message", "")]
    messages += [d.get("message", "") for d in found.get("deployments", {}).values()]
    return ApplicationStatus(
        status=found["status"],
        message="\n".join(dict.fromkeys(message.strip() for message in messages if message.strip())),
        deployments=deployments,
    )


def changes(before: ApplicationStatus | None, now: ApplicationStatus) -> list[str]:
    known = before.deployments if before is not None else {}
    return [f"{name}: {text}" for name, text in now.deployments.items() if known.get(name) != text]


def _readiness(deployment: Mapping[str, Any]) -> str:
    replicas = deployment.get("replicas", [])
    ready = sum(replica.get("state") == "RUNNING" for replica in replicas)
    target = deployment.get("target_num_replicas", len(replicas))
    return f"{ready} of {target} ready"


_POLL_S = 1.0
_GRACE_S = 45.0
WRITE_S = 300.0  # as long as a trainer that is stopped writes


class Stop(Exception):
    """A signal asked the launcher to exit."""


def environment(config: AppConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process of the fleet; the user's own variables win."""
    defaults = {
        "RAY_AUTH_MODE": "disabled",  # a token in the home directory would enable it
        "RAY_USAGE_STATS_ENABLED": "0",
        # With Ray's 15 another busy process takes a fifth of the engines' throughput.
        "RAY_worker_niceness": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if config.security.token_file is not None:  # for jobs in the cluster; a path, which Ray may display
        defaults["SLIPSTREAM_TOKEN_FILE"] = str(config.security.token_file)
    if is_offline(config.model):
        defaults["HF_HUB_OFFLINE"] = "1"
    return {**defaults, **tracing.serve_variables(inherited), **inherited}


def serve(config: Path, dashboard_port: int) -> int:
    """Serve a config file until a signal; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under `nohup`
            signal.signal(number, _raise_stop)
    try:
        _run(read_serve_file(config), dashboard_port)
    except Stop:
        return 0
    except (ConfigError, ClusterError, NotEnough, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    return 0


def _run(file: ServeFile, dashboard_port: int) -> None:
    inherited, lines = doctor.prepare(file)
    for line in lines:
        tell(line)
    cluster = LocalCluster(dashboard_port=dashboard_port, environment=environment(file.config, inherited))
    tell(f"Logs: {logs_of(cluster.directory)} (`slipstream logs` shows them)")
    try:
        with announced("Starting Ray"):
            cluster.start()
        with announced(f"Starting {file.config.engine.first_replicas} replicas of {file.config.model}"):
            cluster.deploy(file.document)
        _watch(cluster, file)
    except Stop:
        with announced("Stopping (Ctrl-C again to kill)") as say:
            _stop_serve(cluster, Store(file.config.store_path), say)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # an interrupted clean-up leaves processes behind
        cluster.stop()
        remove_orphans()
        tell(f"Stopped; logs are in {logs_of(cluster.directory)}")


def why_not_started(message: str) -> str:
    """Serve's message; without the stack for errors that the user can fix: settings, the state directory."""
    end = without_frames(message)
    for error in (ConfigError, JournalError):
        _, name, sentence = end.partition(f"{error.__module__}.{error.__qualname__}: ")
        if name:
            return sentence
    return message[-4000:]


def _watch(cluster: LocalCluster, file: ServeFile) -> None:
    """Print what changes, until Stop, or ClusterError when the fleet cannot start."""
    start_s, before, was_up = time.monotonic(), None, False
    printed_s = start_s
    while True:
        now = _status(cluster, file.application, before)
        lines = changes(before, now)
        if not was_up and not lines and time.monotonic() - printed_s >= QUIET_S:
            lines = [f"starting: {time.monotonic() - start_s:.0f} s"]
        for line in lines:
            tell(f"  {line}")
            printed_s = time.monotonic()
        if now.status == "DEPLOY_FAILED" and not was_up:
            raise ClusterError(f"the fleet could not be started:\n{why_not_started(now.message)}")
        if now.status == "RUNNING" and not was_up:
            was_up = True
            tell(f"Slipstream is up: {file.url} (after {time.monotonic() - start_s:.0f} s; Ctrl-C stops it)")
        elif was_up and now.status != (before.status if before is not None else ""):
            tell(f"  {file.application}: {now.status.lower()}{': ' if now.message else ''}{now.message}")
        before = now
        time.sleep(_POLL_S)


def _status(cluster: LocalCluster, application: str, before: ApplicationStatus | None) -> ApplicationStatus:
    cluster.require_alive()
    try:
        return read_status(cluster.details(), application)
    except httpx.HTTPError as error:  # the fleet serves without the dashboard
        unknown = before.deployments if before is not None else {}
        return ApplicationStatus(status="UNKNOWN", message=repr(error), deployments=unknown)


def _stop_serve(cluster: LocalCluster, store: Store, say: Callable[[str], None]) -> None:
    try:
        cluster.undeploy(_GRACE_S)
        await_writes(store, say)
    except Stop:
        tell("Killing")


def await_writes(
    store: Store, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Wait while processes write to the store: a trainer's last version is on no other disk.

    Args:
        say: takes what is waited for.
    """
    left_s = WRITE_S
    while (written := store.being_written()) and left_s > 0:
        say(f"{', '.join(written)} is being written, at most {left_s:.0f} s more")
        pause(_POLL_S)
        left_s -= _POLL_S


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stop
