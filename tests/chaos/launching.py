"""A fleet as users start it, and its processes, found by a mark that all of them inherit."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.client.connection import bearer
from app.settings.security import OPERATOR_VARIABLE
from tests.environment import users_environment
from tests.fleet.deployed import merged, settings
from tests.fleet.processes import marked, title
from tests.free_ports import free_ports

OWNER_FILE = re.compile(r"slipstream-[0-9a-f]{32}-owner")
MODEL = "marked"
MARK = "SLIPSTREAM_CHAOS"
START_S = 400.0  # four fleets begin at once in `make test`, on two cores
STOP_S = 90.0
# CUDA and joblib leave names of killed processes: benchmarks/RESULTS.md, GPU tests.
LIBRARY_PREFIXES = ("cuda.shm.", "sem.loky-")
DISK_MIB = 128  # for decisions and versions of 1 MiB
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
# On a machine with GPUs a fleet, its trainer and the outside publisher share one.
DEVICE: Mapping[str, Any] = {
    "device": "cuda",
    "engine": {
        "gpus_per_rank": 0.15,
        "gpu_memory_utilization": 0.1,
        "extra": {"attention_backend": "TRITON_ATTN", "kv_cache_memory_bytes": 64 << 20},
    },
    "weights": {"transport": "ipc", "staging": "device"},
    "trainer": {"gpus_per_rank": 0.15},
}
COMMON: Mapping[str, Any] = {
    "served_model_name": MODEL,
    "engine": {"max_model_len": 512, "max_num_seqs": 16},
    "weights": {"heartbeat_timeout_s": 30},
    "router": {"request_timeout_s": 120},
    "store": {"keep": 100},
    "trainer": {"optimizer": {"learning_rate": 1e-6}},
}
SETTINGS: Mapping[str, Any] = merged(COMMON, DEVICE if GPUS else {})
# Part of a process's title, by the name that the cases use. Engine cores are found by replica.
TITLES = {
    "replica": "ServeReplica:slipstream:rollout",
    "controller": "ServeReplica:slipstream:controller",
    "router": "ServeReplica:slipstream:router",
    "trainer": "ServeReplica:slipstream:trainer",
    "trainer_worker": "ray::TrainerWorker",
    "serve_controller": "ray::ServeController",
    "proxy": "haproxy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A fleet that runs.

    Attributes:
        mark: value of the variable that all its processes have.
        token: the operator's, without which most routes refuse; None: none is needed.
        state: its directory of decisions and versions.
        model: the checkpoint that it started from.
    """

    url: str
    dashboard: str
    mark: str
    state: Path
    output: Path
    document: Mapping[str, Any]
    model: Path
    own_disk: bool  # `state` is a small file system
    token: str | None = None

    @property
    def published(self) -> Path:
        """A root below which an arena's fleet publishes directories."""
        return self.model.parent / "published"

    @property
    def replicas(self) -> int:
        return int(self.document["applications"][0]["args"]["engine"]["num_replicas"])

    def client(self, timeout_s: float = 30.0) -> httpx.Client:
        headers = bearer(self.token)
        return httpx.Client(
            base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False, verify=False
        )

    def processes(self) -> list[psutil.Process]:
        """All that live."""
        return list(marked(MARK, self.mark))

    def named(self, name: str) -> list[psutil.Process]:
        """Those that a case calls by this name, oldest first; not those that only build what is to run."""
        found = [process for process in self.processes() if TITLES[name] in title(process)]
        return sorted(found, key=_started)


@contextmanager
def launch(
    root: Path,
    model: Path,
    changes: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    variables: Mapping[str, str] | None = None,
    ended_by: signal.Signals = signal.SIGINT,
    **of_serve: Any,
) -> Iterator[Launched]:
    """A fleet that the launcher has started. A signal ends it, and nothing may be left of it.

    Args:
        changes: of the application's settings.
        variables: of the environment.
        of_serve: other entries of the configuration.
    """
    http_port, dashboard_port = free_ports(2)
    mark = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: sockets are below it
    args = merged(settings(model, root / "state"), changes)
    application = {"name": "slipstream", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    document = {
        "http_options": {"host": host, "port": http_port, "request_timeout_s": None},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
        **of_serve,
    }
    own_disk = _mount(root / "state")
    file, output = root / "serve.yaml", root / "output"
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "app.command.cli", "serve", "--config", str(file)]
    command += ["--dashboard-port", str(dashboard_port)]
    environment = users_environment(
        **{MARK: mark, "TMPDIR": str(scratch), **gpu_variables(), **(variables or {})}
    )
    if token is not None:
        environment[OPERATOR_VARIABLE] = token
    shared = _shared_memory()
    with output.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    try:
        _until_up(process, output)
        yield Launched(
            url=f"http://127.0.0.1:{http_port}",
            dashboard=f"http://127.0.0.1:{dashboard_port}",
            mark=mark,
            state=root / "state",
            output=output,
            document=document,
            model=model,
            own_disk=own_disk,
            token=token,
        )
    finally:
        for each in marked(MARK, mark):  # a stopped process cannot exit
            with suppress(psutil.Error):
                each.resume()
        process.send_signal(ended_by)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            if own_disk:
                subprocess.run(["umount", "--lazy", str(root / "state")], check=True)
    last = output.read_text().rstrip().rpartition("\n")[2]
    assert process.returncode == 0 and last.startswith("Stopped; logs are in "), last
    left = left_behind(mark, shared, scratch)
    assert not left, f"left behind: {left}"


def gpu_variables() -> dict[str, str]:
    """The processes of pytest-xdist take the GPUs in turn; Ray starts no worker for each of many cores."""
    if not GPUS:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(index) for index in range(GPUS)]
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return {"CUDA_VISIBLE_DEVICES": devices[worker % len(devices)], "RAY_prestart_worker_first_driver": "0"}


def left_behind(mark: str, shared: set[str], scratch: Path, patience_s: float = 20.0) -> list[str]:
    """Processes, shared memory and sockets of a fleet that has ended, after a while.

    What a living process holds is not the fleet's, whose processes are gone: other tests run beside it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        left = [f"process {process.pid} {title(process)}" for process in marked(MARK, mark)]
        names = _shared_memory() - shared
        left += [f"/dev/shm/{name}" for name in sorted(names - used_by_others(names, mark))]
        # But for those of Python's own `multiprocessing`, in a process that was killed.
        sockets = [path for path in scratch.rglob("*") if path.is_socket()]
        left += [str(path) for path in sockets if not path.parent.name.startswith("pymp-")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _mount(directory: Path) -> bool:
    """Make the directory a small file system in memory; False where only root may."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _until_up(process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Slipstream is up" not in output.read_text():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.3)


def used_by_others(names: set[str], mark: str) -> set[str]:
    """Those of these names in /dev/shm that a living process without the mark has open or mapped, or whose
    owner's file (`deployments.host.shared_memory`) it has.
    """
    ours = {process.pid for process in marked(MARK, mark)}
    files: dict[tuple[int, int], str] = {}
    for name in names:
        with suppress(OSError):
            files[_identity(f"/dev/shm/{name}")] = name
    held: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in ours:
            continue
        with suppress(OSError):  # it has ended meanwhile
            maps = (entry / "maps").read_text()
            held |= {name for name in names if f"/dev/shm/{name}" in maps}
            for opened in (entry / "fd").iterdir():
                with suppress(OSError, KeyError):
                    held.add(files[_identity(opened)])  # an owner's file was opened before it had a name
    owners = {name.removesuffix("owner") for name in held if OWNER_FILE.fullmatch(name)}
    return held | {name for name in names if any(owner in name for owner in owners)}


def _identity(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _shared_memory() -> set[str]:
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(LIBRARY_PREFIXES)}


def _started(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(process.create_time())
    return 0.0
