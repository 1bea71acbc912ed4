"""Processes that begin with torch, transformers and vLLM imported: one server imports them, and forks.

vLLM and torch.distributed keep what is global in a process. Where the product's server has forked this
process, as in `make test`, it is that one. On machines with CUDA devices they are spawned.
"""

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from deployments.host.fork_server.client import SWITCH
from deployments.host.fork_server.server import PRELOAD, PRELOAD_CPU

IN_A_FORK = os.environ.get(SWITCH, "off") != "off"
if IN_A_FORK:
    multiprocessing.set_executable(sys.executable)  # what is tested has no clients of forks as children
_used_s = 0.0  # processor time of those that have answered


def has_cuda() -> bool:
    """As `torch.cuda.is_available`, without the seconds that importing torch takes."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def _context() -> Any:
    """The start method of such processes."""
    if has_cuda() or IN_A_FORK:
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*PRELOAD, *PRELOAD_CPU])
    return forks


def started(function: Callable[..., Any], args: tuple[Any, ...], daemon: bool = False) -> BaseProcess:
    process: BaseProcess = _context().Process(target=function, args=args, daemon=daemon)
    if IN_A_FORK:
        multiprocessing.set_executable(f"{os.environ[SWITCH]}/python")
    try:
        process.start()
    finally:
        multiprocessing.set_executable(sys.executable)
    return process


def call(function: Callable[..., Any], *args: Any, timeout_s: float = 280.0, **environment: str) -> Any:
    """A module's function in a process of its own: what it returns."""
    return call_all(function, [args], timeout_s, environment)[0]


def call_all(
    function: Callable[..., Any],
    all_args: Sequence[tuple[Any, ...]],
    timeout_s: float,
    environment: Mapping[str, str],
) -> list[Any]:
    """As many processes at once: what each returns.

    Raises:
        AssertionError: one raised, died or was late, with its output. The others are killed.
    """
    calls = [_Call(function, args, dict(environment)) for args in all_args]
    try:
        deadline = time.monotonic() + timeout_s
        waiting = {each.connection: each for each in calls}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"no answer in {timeout_s:g} s\n" + "\n".join(c.said() for c in calls))
            for connection in ready:
                waiting.pop(connection).receive()  # type: ignore[call-overload]
        for each in calls:
            print(each.said())
        return [each.result for each in calls]
    finally:
        for each in calls:
            each.end()


def cpu_s() -> float:
    """What they have used: this process does not wait for forks, which are the server's children."""
    return _used_s


class _Call:
    def __init__(self, function: Callable[..., Any], args: Any, environment: Any) -> None:
        self.result: Any = None
        self._output = tempfile.NamedTemporaryFile(prefix="forked-", mode="r", errors="replace")  # noqa: SIM115
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        self._process = started(_answer, (theirs, self._output.name, environment, function, args))
        theirs.close()

    def receive(self) -> None:
        try:
            used_s, error, self.result = self.connection.recv()
        except EOFError:
            self._process.join(10)
            raise AssertionError(f"died: exit code {self._process.exitcode}\n{self.said()}") from None
        global _used_s
        _used_s += used_s
        if error is not None:
            raise AssertionError(f"{error}\n{self.said()}")
        self._process.join(10)

    def said(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._output.close()


def _answer(
    answers: Connection, output: str, environment: Any, function: Callable[..., Any], args: Any
) -> None:
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # more only wait for each other where other tests run as well
    gc.freeze()  # vLLM collects whenever it loads a model: the objects of what is imported are most of it
    error, result = None, None
    try:
        result = function(*args)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    sys.stdout.flush()
    sys.stderr.flush()
    answers.send((time.process_time(), error, result))
