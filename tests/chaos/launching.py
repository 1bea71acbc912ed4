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

from app.command.ports import free_ports
from tests.chaos.marked_weights import save_marked
from tests.environment import users_environment

OWNER_FILE = re.compile(r"slipstream-[0-9a-f]{32}-owner")
MODEL = "marked"
MARK = "SLIPSTREAM_CHAOS"
START_S = 240.0
STOP_S = 90.0
DISK_MIB = 128  # for decisions and versions of 1 MiB
SETTINGS: Mapping[str, Any] = {
    "engine": {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "num_replicas": 2,
    },
    "weights": {"lease_s": 30},  # of a publisher that was killed: not shorter than a heartbeat
    "router": {"request_timeout_s": 120},
    "store": {"keep": 100},
    "trainer": {"optimizer": {"learning_rate": 1e-6}},
}
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
        state: its directory of decisions and versions.
    """

    url: str
    dashboard: str
    mark: str
    state: Path
    output: Path
    document: Mapping[str, Any]
    own_disk: bool  # `state` is a small file system

    @property
    def replicas(self) -> int:
        return int(self.document["applications"][0]["args"]["engine"]["num_replicas"])

    def client(self, timeout_s: float = 30.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def processes(self) -> list[psutil.Process]:
        """All that live."""
        return list(_marked(self.mark))

    def named(self, name: str) -> list[psutil.Process]:
        """Those that a case calls by this name, oldest first; not those that only build what is to run."""
        found = [process for process in self.processes() if TITLES[name] in _title(process)]
        return sorted(found, key=_started)


def engine_core(replica: psutil.Process) -> psutil.Process:
    """The process of a replica's engine, whose worker it is as well."""
    (core,) = [each for each in replica.children(recursive=True) if "VLLM::EngineCore" in _title(each)]
    return core


@contextmanager
def launch(root: Path, settings: Mapping[str, Any], **of_serve: Any) -> Iterator[Launched]:
    """A fleet of the marked model, started by the launcher. Ctrl-C ends it, and nothing may be left of it.

    Args:
        settings: of the application.
        of_serve: other entries of the configuration.
    """
    http_port, dashboard_port = free_ports(2)
    mark = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # short: sockets are below it
    args = {
        "model": str(save_marked(root / "model", 0)),
        "served_model_name": MODEL,
        "state_dir": str(root / "state"),
        **settings,
    }
    application = {"name": "slipstream", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    document = {
        "http_options": {"host": "127.0.0.1", "port": http_port, "request_timeout_s": None},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
        **of_serve,
    }
    own_disk = _mount(root / "state")
    file, output = root / "serve.yaml", root / "output"
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "app.command.cli", "serve", "--config", str(file)]
    command += ["--dashboard-port", str(dashboard_port)]
    environment = users_environment(**{MARK: mark, "TMPDIR": str(scratch)})
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
            own_disk=own_disk,
        )
    finally:
        for each in _marked(mark):  # a stopped one ends nobody
            with suppress(psutil.Error):
                each.resume()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            if own_disk:
                subprocess.run(["umount", "--lazy", str(root / "state")], check=True)
    left = left_behind(mark, shared, scratch)
    assert not left, f"left behind: {left}"


def left_behind(mark: str, shared: set[str], scratch: Path, patience_s: float = 20.0) -> list[str]:
    """Processes, shared memory and sockets of a fleet that has ended, after a while.

    What a living process holds is not the fleet's, whose processes are gone: other tests run beside it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        left = [f"process {process.pid} {_title(process)}" for process in _marked(mark)]
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


def _marked(mark: str) -> Iterator[psutil.Process]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, psutil.Error):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def used_by_others(names: set[str], mark: str) -> set[str]:
    """Those of these names in /dev/shm that a living process without the mark has open or mapped, or whose
    owner's file (`deployments.weights.wire.ownership`) it has.
    """
    ours = {process.pid for process in _marked(mark)}
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
    return {path.name for path in Path("/dev/shm").iterdir()}


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()[:2]) or process.name()
    return ""


def _started(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(process.create_time())
    return 0.0
