"""Imports what engines and trainer workers need, then forks for each client.

    python server.py DIRECTORY OWNER LOCK

LOCK: a locked file's descriptor, kept while the server lives. It exits with its owner (the process id of the
host's raylet), or after `IDLE_S` without a fork. It imports no module of Slipstream's: a redeployed
application gets its new code.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

IDLE_S = 60.0
RESERVED = "reserved"
CUDA_NOT_INITIALIZED = 3
# Library threads that wait without a lock: jemalloc's (pyarrow's) and the NVIDIA driver's.
IDLE_THREADS = ("jemalloc_bg_thd", "cuda0")
BEFORE_IMPORTS = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's library starts threads at import
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # as vLLM sets it, but before any import looks for CUDA
}
SWITCH = "SLIPSTREAM_FORK_SERVER"
MODULES = "SLIPSTREAM_PRELOAD"  # separated by commas, instead of those below
MOST_DESCRIPTORS = 200
FIRST_OWN = 256  # above what Ray's workers inherit
PRELOAD = (
    *("torch", "transformers", "safetensors.torch", "accelerate", "peft"),
    *("vllm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"),
    *("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.launchers.app"),
    *("vllm.distributed.weight_transfer", "vllm.lora.worker_manager"),
)
PRELOAD_CPU = ("vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu_worker")
PRELOAD_GPU = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker")

Request = dict[str, Any]


def main() -> None:
    directory, owner, lock = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(lock, False)
    del sys.path[0]  # this file's folder: its modules would hide others
    os.environ |= BEFORE_IMPORTS
    try:
        with _low_descriptors_taken():
            preload(os.environ[MODULES].split(",") if MODULES in os.environ else _modules())
            _require_forkable()
    except BaseException as error:  # tells the next client, which would wait for the same error
        with open(f"{directory}/failing", "w") as file:
            file.write(f"the fork server's imports failed: {type(error).__name__}: {error}")
        os.replace(f"{directory}/failing", f"{directory}/failed")  # a client never reads half of it
        raise
    client = serve(directory, owner, lock)
    if client is not None:
        _exit_after(_receive_request(client))


@contextlib.contextmanager
def _low_descriptors_taken() -> Iterator[None]:
    """Numbers below `FIRST_OWN` are for clients: a fork cannot have a file of its imports there too.

    On GPUs the imports keep files open.
    """
    taken = os.memfd_create("taken")
    number = taken
    while number < FIRST_OWN:
        number = os.dup(taken)
    yield
    for number in range(FIRST_OWN):
        with contextlib.suppress(OSError):
            if number != taken and os.path.sameopenfile(number, taken):
                os.close(number)
    os.close(taken)


def _modules() -> Iterator[str]:
    yield from PRELOAD
    platform = importlib.import_module("vllm.platforms").current_platform
    yield from PRELOAD_CPU if platform.is_cpu() else PRELOAD_GPU


def preload(names: Iterable[str]) -> None:
    """Import everything but Ray, whose extension module seeds its random ids at import.

    Forks would give different tasks the same id, which fails a check of Ray 2.60 in Serve's controller
    (core_worker.cc, `erased == 1`). vLLM works without Ray if it cannot be imported.
    """
    sys.modules["ray"] = None  # type: ignore[assignment]  # Python's way to make an import fail
    gc.disable()  # a sixth of the imports' processor time
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        del sys.modules["ray"]
        gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of every object


def _require_forkable() -> None:
    """A fork has only the thread that forked, and cannot use CUDA if its parent has initialised it."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        while nvml.nvmlShutdown() == 0:  # torch looks for GPUs at import and leaves NVML's files open
            pass
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_NOT_INITIALIZED:
            raise RuntimeError("an import has initialised CUDA")
    threads = []
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{number}/comm") as file:
            threads.append(file.read().strip())
    others = [name for name in threads if not name.startswith(IDLE_THREADS)]
    if len(others) != 1:
        raise RuntimeError(f"expected one thread after the imports, got {others}")


def serve(directory: str, owner: int, lock: int) -> socket.socket | None:
    """Fork for each connection that sends data. Returns it in the fork, where nothing else is open, and None
    in the server when it stops."""
    _list_descriptors(directory, lock)
    owner_process = os.pidfd_open(owner)
    reaped, wakeup = os.pipe()
    for descriptor in (reaped, wakeup):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_stop, directory, os.getpid()))
    listener = _listen(directory)
    clients: dict[int, socket.socket] = {}
    idle_since = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for source in (listener, owner_process, reaped):
            selector.register(source, selectors.EVENT_READ)
        while clients or time.monotonic() < idle_since + IDLE_S:
            ready = [key.fileobj for key, _ in selector.select(IDLE_S)]
            if owner_process in ready:
                break
            if reaped in ready:
                _report_exits(reaped, clients)
                idle_since = time.monotonic()
            if listener in ready:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            for client in ready:
                if not isinstance(client, socket.socket) or client is listener:
                    continue
                selector.unregister(client)
                if not client.recv(1, socket.MSG_PEEK):  # `_accepts` in client.py
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (owner_process, reaped, wakeup, lock):
                        os.close(descriptor)
                    open_sockets = [key.fileobj for key in selector.get_map().values()]
                    for each in (*open_sockets, *clients.values()):
                        if isinstance(each, socket.socket):
                            each.close()
                    return client
                clients[pid] = client
                process = os.pidfd_open(pid)  # valid even if it has exited: it was not waited for
                with contextlib.suppress(OSError):
                    socket.send_fds(client, [struct.pack("q", pid)], [process])
                os.close(process)
    shutil.rmtree(directory, ignore_errors=True)
    return None


def _list_descriptors(directory: str, lock: int) -> None:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    opened = [
        each for each in listed if each not in (0, 1, 2, lock) and os.path.exists(f"/proc/self/fd/{each}")
    ]
    with open(f"{directory}/{RESERVED}", "w") as file:
        json.dump(opened, file)


def _stop(directory: str, server: int, *_: object) -> None:
    if os.getpid() == server:  # a fork inherits the handler
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _listen(directory: str) -> socket.socket:
    """Also writes the executable that multiprocessing uses as interpreter."""
    path = f"{directory}/socket"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    client = os.path.join(os.path.dirname(os.path.realpath(__file__)), "client.py")
    words = " ".join(shlex.quote(word) for word in (sys.executable, "-IS", client, directory))
    with open(f"{directory}/python", "w", opener=lambda name, flags: os.open(name, flags, 0o700)) as file:
        file.write(f'#!/bin/sh\nexec {words} "$@"\n')
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def _report_exits(reaped: int, clients: dict[int, socket.socket]) -> None:
    os.read(reaped, 4096)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with clients.pop(pid) as client, contextlib.suppress(OSError):
            client.sendall(struct.pack("q", os.waitstatus_to_exitcode(status)))


def _receive_request(client: socket.socket) -> Request:
    head, received, _, _ = socket.recv_fds(client, struct.calcsize("qq"), MOST_DESCRIPTORS)
    length, count = struct.unpack("qq", head)
    assert len(received) == count, f"expected {count} descriptors, got {len(received)}"
    with client, client.makefile("rb") as stream:
        body = stream.read(length)
    if len(body) < length:
        os._exit(1)
    request: Request = json.loads(body)
    _take_descriptors(request["descriptors"], received)
    return request


def _take_descriptors(numbers: list[int], received: list[int]) -> None:
    """The first one is the lifeline."""
    above = max(FIRST_OWN, *numbers, 0) + 1
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in received]
    for each in received:
        os.close(each)
    lifeline, *others = high
    for source, number in zip(others, numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    die_with(lifeline)


def die_with(descriptor: int) -> None:
    """The kernel kills this process when the pipe's write end is closed.

    Unlike PR_SET_PDEATHSIG this works for processes that are no children, and ignores exiting threads.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, 10, signal.SIGKILL)  # F_SETSIG; Python's fcntl lacks it before 3.13
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        if selector.select(0):  # it was closed before the signal was requested
            os._exit(1)


def _exit_after(request: Request) -> None:
    """Exits as multiprocessing's forks do, without finalizing 6,000 modules."""
    status = 1
    try:
        run(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:  # as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status & 0xFF)


def run(request: Request) -> None:
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_environment(request["environment"])
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(request["oom_score_adj"])
    options, words = request["command"][: request["options"]], request["command"][request["options"] :]
    unbuffered = "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if unbuffered else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    _apply_what_imports_have_read()
    multiprocessing.set_executable(os.path.join(os.environ[SWITCH], "python"))  # its children are forks too
    _run_command(words)


def _take_environment(environment: dict[str, str]) -> None:
    """Apply the client's variables except the first: libraries that set the process title use its memory."""
    first = next(iter(os.environ))
    for name in os.environ.keys() - environment.keys() - {first}:
        del os.environ[name]
    for name, value in environment.items():
        if name != first and os.environ.get(name) != value:
            os.environ[name] = value


def _apply_what_imports_have_read() -> None:
    if "torch" in sys.modules:
        threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
        sys.modules["torch"].set_num_threads(int(threads))
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run_command(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        code, sys.argv = words[1], ["-c", *words[2:]]
        sys.path.insert(0, "")
        name = "<string>"
    else:
        name, sys.argv = words[0], words
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        with open(name) as file:
            code = file.read()
    main_module = type(sys)("__main__")
    if words[0] != "-c":
        main_module.__file__ = name
    sys.modules["__main__"] = main_module
    exec(compile(code, name, "exec"), main_module.__dict__)


if __name__ == "__main__":
    main()
