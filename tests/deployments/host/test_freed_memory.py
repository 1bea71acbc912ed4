"""An engine that frees memory and takes as much again touches no new page."""

import os
import platform
import subprocess
import sys

import pytest

from deployments.host.fork_server.use import CLIENT
from deployments.host.freed_memory import SETTINGS, keeping_freed_memory

# Blocks of the sizes that a version has, by the thread that stages and not the first one of the process.
PROGRAM = """
import ctypes, resource, threading
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes, c.memset.argtypes = (
    ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t])
def version():
    blocks = [(c.malloc(size), size) for size in [120 << 20] + 20 * [3 << 20]]
    for block, size in blocks:
        c.memset(block, 1, size)
    return blocks
def updates():
    live = version()
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shadow = version()
        for block, _ in live:
            c.free(block)
        live = shadow
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=updates)
thread.start()
thread.join()
"""
PAGES = 180 * 256  # of a version


def faults(environment: dict[str, str], *client: str) -> list[int]:
    answer = subprocess.run(
        [sys.executable, *client, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return [int(line) for line in answer.stdout.split()]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_an_update_after_the_first_takes_no_new_memory() -> None:
    plain = faults(dict(os.environ))
    assert min(plain) > PAGES / 2, f"glibc keeps it by itself: {plain}"
    first, *later = faults(os.environ | keeping_freed_memory())
    assert first > PAGES / 2 and max(later) < PAGES / 20, (first, later)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_fork_of_a_process_that_has_imported_vllm_takes_no_new_memory_either() -> None:
    _, *later = faults(os.environ | keeping_freed_memory(), "-IS", str(CLIENT), "auto")
    assert max(later) < PAGES / 20, later


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    assert keeping_freed_memory() == {**SETTINGS, "MALLOC_ARENA_MAX": "8"}
