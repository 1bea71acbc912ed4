"""Processes of a fleet, as the operating system shows them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from deployments.host.shared_memory import DIRECTORY, PREFIX
from tests.waiting import until

_CLIENT = "fork_server/client.py"
_ENGINE = "VLLM::EngineCore"


def title(process: psutil.Process) -> str:
    """The first words of its command line; empty if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()[:2]) or str(process.name())
    return ""


def marked(variable: str, value: str) -> Iterator[psutil.Process]:
    """Those that were started with this environment variable, and live."""
    wanted = f"{variable}={value}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, psutil.Error):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Its children and theirs, and the forks that some of them stand in for."""
    found: dict[int, psutil.Process] = {}
    waiting = [process]
    while waiting:
        current = waiting.pop()
        with suppress(psutil.Error, OSError):
            for child in [*current.children(), *_forks(current)]:
                if child.pid not in found:
                    found[child.pid] = child
                    waiting.append(child)
    return list(found.values())


def _forks(client: psutil.Process) -> Iterator[psutil.Process]:
    """A client of the fork server holds a descriptor of the fork, which is the server's child."""
    if not any(word.endswith(_CLIENT) for word in client.cmdline()):
        return
    for entry in Path(f"/proc/{client.pid}/fdinfo").iterdir():
        with suppress(OSError, psutil.Error):
            for line in entry.read_text().splitlines():
                if line.startswith("Pid:") and int(line.split()[1]) > 0:
                    yield psutil.Process(int(line.split()[1]))


def engine_of(replica: psutil.Process) -> psutil.Process:
    """The process of a replica's engine, whose worker it is as well."""
    (engine,) = [each for each in descendants(replica) if _ENGINE in title(each)]
    return engine


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_ended(processes: list[psutil.Process], timeout_s: float) -> None:
    until(lambda: not any(map(is_running, processes)), timeout_s, f"the end of {processes}", pause_s=0.01)


def names_of(replica: psutil.Process) -> list[str]:
    """What a living replica and its engine have named in /dev/shm; each name contains its owner's."""
    for file in DIRECTORY.glob(f"{PREFIX}-*-owner"):
        with suppress(OSError):
            if file.read_text().split()[-1:] == [str(replica.pid)]:
                owner = file.name.removesuffix("owner")
                return sorted(path.name for path in DIRECTORY.iterdir() if owner in path.name)
    raise AssertionError(f"{replica} owns no name")


def wait_until_gone(names: list[str], timeout_s: float = 30.0) -> None:
    """From /dev/shm."""
    until(lambda: not any((DIRECTORY / name).exists() for name in names), timeout_s, f"{names} are gone")
