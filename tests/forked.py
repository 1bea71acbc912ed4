"""Processes that begin with torch, transformers and vLLM imported: one server imports them, and forks.

vLLM and torch.distributed keep what is global in a process. Where there are CUDA devices they are spawned.
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

import psutil

# Modules of other people only: those of the project are imported after the fork, as they are by then.
PRELOADED = [
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "peft",
    "vllm.engine.arg_utils",
    "vllm.lora.worker_manager",
    "vllm.model_executor.model_loader",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]
_servers: set[int] = set()  # process ids


def has_cuda() -> bool:
    """As `torch.cuda.is_available`, without the seconds that importing torch takes."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def context() -> Any:
    """The start method of such processes."""
    if has_cuda():
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    return forks


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
    calls = [_Call(context(), function, args, dict(environment)) for args in all_args]
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
    """What the servers and their children have used, which are no children that this process waits for."""
    used = 0.0
    for pid in _servers:
        try:
            used += sum(psutil.Process(pid).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return used


class _Call:
    def __init__(self, context: Any, function: Callable[..., Any], args: Any, environment: Any) -> None:
        self.result: Any = None
        self._output = tempfile.NamedTemporaryFile(prefix="forked-", mode="r", errors="replace")  # noqa: SIM115
        self.connection, theirs = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(
            target=_answer, args=(theirs, self._output.name, environment, function, args)
        )
        self._process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            server, error, self.result = self.connection.recv()
        except EOFError:
            self._process.join(10)
            raise AssertionError(f"died: exit code {self._process.exitcode}\n{self.said()}") from None
        if server != os.getpid():
            _servers.add(server)
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
    try:
        answer = (os.getppid(), None, function(*args))
    except BaseException as error:
        traceback.print_exc()
        answer = (os.getppid(), f"{type(error).__name__}: {error}", None)
    sys.stdout.flush()
    sys.stderr.flush()
    answers.send(answer)
