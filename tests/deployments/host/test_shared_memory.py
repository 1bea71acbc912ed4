import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.host.shared_memory import (
    DIRECTORY,
    create_mapping,
    disown,
    open_mapping,
    owner,
    remove_orphans,
    remove_segment,
)


@pytest.fixture
def segment() -> Iterator[str]:
    name, mapping = create_mapping(16)
    mapping[:5] = b"hello"
    yield name
    remove_segment(name)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../slipstream-" + "0" * 32 + "-" + "0" * 32, "psm_1234", 5]
)
def test_only_names_of_our_own_segments_are_opened(name: object) -> None:
    expected = f"^expected the name of a Slipstream segment, got {re.escape(repr(name))}$"
    with pytest.raises(ValueError, match=expected):
        open_mapping(name, mmap.ACCESS_READ)  # type: ignore[arg-type]


def test_a_segment_that_does_not_fit_is_refused_with_the_sizes_and_leaves_no_name() -> None:
    own = owner().name("*")
    before = set(DIRECTORY.glob(own))
    with pytest.raises(OSError, match=rf"{1 << 60} bytes do not fit into /dev/shm \(\d+ bytes free\)"):
        create_mapping(1 << 60)
    assert set(DIRECTORY.glob(own)) == before


HOLDS = """
import multiprocessing.synchronize, os, sys, time
from deployments.host.shared_memory import DIRECTORY, disown, owner
from deployments.host.shared_memory import create_mapping
create_mapping(8)
(DIRECTORY / owner().name("ipc")).mkdir()
(DIRECTORY / owner().name("ipc") / "socket").touch()
(DIRECTORY / ("sem." + owner().name("mp-1"))).touch()
print(owner().id, os.getpid(), flush=True)
if sys.stdin.readline():
    disown()
    print("disowned", flush=True)
    sys.stdin.read()
"""


class Holder:
    """A process with a segment, a directory and a semaphore."""

    def __init__(self, *prefix: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.owner_id, self.pid = self._process.stdout.readline().split()  # its number where it runs

    def names(self) -> list[str]:
        return [path.name for path in DIRECTORY.iterdir() if f"slipstream-{self.owner_id}-" in path.name]

    def disown(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("disown\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "disowned\n"

    def kill(self, wait: bool = True) -> None:
        self._process.send_signal(signal.SIGKILL)
        if wait:
            self._process.wait()
        else:  # a zombie
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def holder() -> Iterator[Callable[..., Holder]]:
    started: list[Holder] = []

    def start(*prefix: str) -> Holder:
        started.append(Holder(*prefix))
        return started[-1]

    yield start
    for each in started:
        each.kill()
    remove_orphans()


def test_names_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(
    holder: Callable[..., Holder],
) -> None:
    killed, living = holder(), holder()
    assert len(killed.names()) == len(living.names()) == 4
    killed.kill()
    remove_orphans()
    assert killed.names() == []
    assert len(living.names()) == 4


@pytest.fixture
def left_by_libraries() -> Iterator[Callable[[int], list[Path]]]:
    """Makes what torch and the CUDA driver leave of a process with this number that is killed."""
    made: list[Path] = []

    def make(pid: int) -> list[Path]:
        new = [DIRECTORY / f"torch_{pid}_1234_0", DIRECTORY / f"cuda.shm.0.{pid:x}.1"]
        for path in new:
            path.touch()
        made.extend(new)
        return new

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("waited_for", [True, False])
def test_files_that_libraries_left_are_removed_with_the_names_of_a_killed_process(
    holder: Callable[..., Holder], left_by_libraries: Callable[[int], list[Path]], waited_for: bool
) -> None:
    killed, living = holder(), holder()
    gone, kept = left_by_libraries(int(killed.pid)), left_by_libraries(int(living.pid))
    others = left_by_libraries(10 * int(killed.pid))  # its number begins as the killed one's
    remove_orphans()
    assert all(path.exists() for path in (*gone, *kept, *others))
    killed.kill(wait=waited_for)
    remove_orphans()
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in (*kept, *others))


def test_files_that_libraries_left_are_removed_once_the_process_has_exited(
    holder: Callable[..., Holder], left_by_libraries: Callable[[int], list[Path]]
) -> None:
    disowns = holder()
    left = left_by_libraries(int(disowns.pid))
    disowns.disown()
    remove_orphans()
    assert all(path.exists() for path in left) and disowns.names() == [f"slipstream-{disowns.owner_id}-owner"]
    disowns.kill()
    remove_orphans()
    assert not any(path.exists() for path in left) and disowns.names() == []


SHARES = """
import os, sys, torch
from torch.multiprocessing.reductions import reduce_tensor
from deployments.host.shared_memory import disown, owner
owner()
shared = reduce_tensor(torch.ones(8, device="cuda"))
print(os.getpid(), flush=True)
if sys.stdin.readline():
    disown()
    os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("killed", [True, False])
def test_of_a_process_that_shared_memory_of_a_gpu_nothing_is_left(killed: bool) -> None:
    shares = subprocess.Popen(
        [sys.executable, "-c", SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert shares.stdin is not None and shares.stdout is not None
    pid = int(shares.stdout.readline())
    names = (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*")
    try:
        assert [path for each in names for path in DIRECTORY.glob(each)]  # else torch makes none any more
        if not killed:  # as Ray ends an actor: Python's exit, and not the driver's
            shares.communicate("end\n", timeout=60)
    finally:
        shares.kill()
        shares.wait()
    remove_orphans()
    assert not [path for each in names for path in DIRECTORY.glob(each)]


def test_process_ids_of_another_namespace_are_ignored(
    holder: Callable[..., Holder], left_by_libraries: Callable[[int], list[Path]]
) -> None:
    inside = holder(*in_a_namespace())
    remove_orphans()
    assert len(inside.names()) == 4, "outside, its process id is that of another process"
    same_number = left_by_libraries(int(inside.pid))
    (DIRECTORY / f"slipstream-{inside.owner_id}-owner").write_text(
        f"pid:[1] {2**22 + 1}"
    )  # no such process here
    free_number = left_by_libraries(2**22 + 1)
    inside.kill()
    deadline = time.monotonic() + 20
    while inside.names():
        assert time.monotonic() < deadline, inside.names()
        remove_orphans()
        time.sleep(0.05)
    assert all(path.exists() for path in (*same_number, *free_number))


def in_a_namespace() -> tuple[str, ...]:
    command = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this user may not make a process namespace")
    return command


def test_names_of_other_programs_are_left_alone() -> None:
    others = [DIRECTORY / f"psm_{os.getpid()}", DIRECTORY / f"slipstream-{os.getpid()}-notes"]
    for path in others:
        path.touch()
    try:
        remove_orphans()
        assert all(path.exists() for path in others)
    finally:
        for path in others:
            path.unlink()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"pid:[1] 99999999999999999999"])
def test_an_owner_file_without_a_process_id_still_owns_its_names(content: bytes | None) -> None:
    names, file = DIRECTORY / owner().name("x"), DIRECTORY / owner().name("owner")
    names.touch()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    disown()
    assert not names.exists() and not file.exists()


def test_a_process_removes_its_own_names() -> None:
    names = Path(DIRECTORY / owner().name("x"))
    names.touch()
    own = owner().id
    remove_orphans()
    assert names.exists()
    disown()
    assert not [path for path in DIRECTORY.iterdir() if own in path.name]
    assert owner().id != own
