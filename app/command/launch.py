"""Starts the fleet in the foreground: `slipstream serve`.

    check the file ─► prepare the model ─► Ray ─► Serve ─► "Slipstream is up"
                                                    │
                          Ctrl-C, SIGTERM, SIGHUP, a failed start, Ray's exit
                                                    ▼
                             Serve shuts down ─► Ray stops ─► no process and no name in /dev/shm is left

Serve has 45 s to shut down; then `serve` waits for writes to the store. A second Ctrl-C skips both.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.client.announcement import announced, tell
from app.command import doctor
from app.command.cluster import Cluster, ClusterError, LocalCluster, require_no_listener, without_frames
from app.command.deploy import ServeFile, read_serve_file
from app.command.machine import NotEnough
from app.command.runs import logs_of
from app.command.shell import reported, stop_signals
from app.settings.config import AppConfig
from app.settings.models import is_offline
from app.settings.section import ConfigError
from app.settings.security import is_loopback
from deployments.host import tracing
from deployments.host.shared_memory import remove_orphans
from deployments.protocol.errors import JournalError
from deployments.weights.store.versions import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationStatus:
    status: str
    message: str
    deployments: Mapping[str, str] = field(default_factory=dict)  # such as "1 of 2 ready"


def read_status(details: Mapping[str, Any], application: str) -> ApplicationStatus:
    """From Serve's REST status (GET /api/serve/applications/)."""
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
WRITE_S = 300.0  # as long as a stopping trainer may write


class Stop(Exception):
    """A signal arrived."""


def environment(config: AppConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """For every process of the fleet; the user's variables win."""
    defaults = {
        "RAY_AUTH_MODE": "disabled",  # else a token in the home directory enables it
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of 15 costs a fifth of the throughput beside another busy process.
        "RAY_worker_niceness": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if config.security.token_file is not None:  # jobs read it; Ray may display a path
        defaults["SLIPSTREAM_TOKEN_FILE"] = str(config.security.token_file)
    if is_offline(config.model):
        defaults["HF_HUB_OFFLINE"] = "1"
    # `ray job submit -- slipstream rl` finds the fleet's own Python, not the machine's.
    path = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), inherited.get("PATH"))))
    return {**defaults, **tracing.serve_variables(inherited), **inherited, "PATH": path}


def serve(config: Path, dashboard_port: int, address: str | None = None) -> None:
    """Until a signal. `address`: the dashboard of a Ray cluster that stays up; None: a cluster of this
    machine."""
    for number in stop_signals():
        signal.signal(number, _raise_stop)
    with reported(ClusterError, NotEnough, ValueError), suppress(Stop):
        if address is None:
            _run(read_serve_file(config), dashboard_port)
        else:
            join(read_serve_file(config), address)


def _run(file: ServeFile, dashboard_port: int) -> None:
    inherited, lines = doctor.prepare(file)
    for line in lines:
        tell(line)
    cluster = LocalCluster(dashboard_port=dashboard_port, environment=environment(file.config, inherited))
    began = time.monotonic()
    tell(f"Logs: {logs_of(cluster.directory)}")
    try:
        with announced("Starting Ray"):
            cluster.start()
        _serve(cluster, file, file.url, began)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # an interrupted clean-up would leave processes
        with announced("Stopping Ray"):
            cluster.stop()
            remove_orphans()
        tell(f"Stopped; logs are in {logs_of(cluster.directory)}")


def join(file: ServeFile, address: str) -> None:
    cluster = Cluster(address, os.environ)
    try:
        others = cluster.applications() - {file.application}
        if others:
            raise ClusterError(
                f"expected a Ray cluster without other Serve applications, which this one would replace, got "
                f"one with {', '.join(sorted(others))}"
            )
        head = urlsplit(address).hostname or address
        if not cluster.details().get("proxies") and not is_loopback(file.host):
            require_no_listener(head, file.port)
        _serve(cluster, file, file.url_on(head), time.monotonic())
    finally:
        cluster.close()


def _serve(cluster: Cluster, file: ServeFile, url: str, began: float) -> None:
    try:
        with announced(f"Starting {file.config.engine.first_replicas} replicas of {file.config.model}"):
            cluster.deploy(file.document)
            started = _follow(cluster, file.application, until="RUNNING")
        tell(f"Slipstream is up: {url} (after {time.monotonic() - began:.0f} s; Ctrl-C stops it)")
        _follow(cluster, file.application, started, until=None)
    except Stop:
        with announced("Stopping (Ctrl-C again to kill)") as say:
            _stop_serve(cluster, Store(file.config.store_path), say)


# Of deployments that only wait for the one that failed.
_SLOW = re.compile(r"Deployment '.* that have taken more than |This may be caused by a slow __init__")


def why_not_started(message: str) -> str:
    """Omits the stack of an error that the user can fix, and what else Serve complains of then."""
    message = "\n".join(line for line in message.splitlines() if not _SLOW.match(line))
    end = without_frames(message)
    for error in (ConfigError, JournalError):
        _, name, sentence = end.partition(f"{error.__module__}.{error.__qualname__}: ")
        if name:
            return sentence
    if end.startswith(
        wrong := "ValueError: "
    ):  # such as a model that cannot be downloaded; logs have the stack
        return end.removeprefix(wrong)
    return message[-4000:]


def _follow(
    cluster: Cluster, application: str, before: ApplicationStatus | None = None, *, until: str | None
) -> ApplicationStatus:
    """Print changes until the application has the status `until`. Raises ClusterError if it cannot start."""
    while True:
        now = _status(cluster, application, before)
        for line in changes(before, now):
            tell(f"  {line}")
        if now.status == until:
            return now
        if until is not None and now.status == "DEPLOY_FAILED":
            raise ClusterError(f"the fleet could not be started:\n{why_not_started(now.message)}")
        if until is None and before is not None and now.status != before.status:
            tell(f"  {application}: {now.status.lower()}{': ' if now.message else ''}{now.message}")
        before = now
        time.sleep(_POLL_S)


def _status(cluster: Cluster, application: str, before: ApplicationStatus | None) -> ApplicationStatus:
    cluster.require_alive()
    try:
        return read_status(cluster.details(), application)
    except httpx.HTTPError as error:  # the fleet can serve without the dashboard
        unknown = before.deployments if before is not None else {}
        return ApplicationStatus(status="UNKNOWN", message=repr(error), deployments=unknown)


def _stop_serve(cluster: Cluster, store: Store, say: Callable[[str], None]) -> None:
    try:
        cluster.undeploy(_GRACE_S)
        await_writes(store, say)
    except Stop:
        tell("Killing")


def await_writes(
    store: Store, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """The trainer's last version may be on no other disk."""
    left_s, before = WRITE_S, False
    while ((written := store.being_written()) or before) and left_s > 0:
        if written:
            say(f"{', '.join(written)} is being written, at most {left_s:.0f} s more")
        before = bool(written)  # its writer may be about to begin the next version
        pause(_POLL_S)
        left_s -= _POLL_S


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stop
