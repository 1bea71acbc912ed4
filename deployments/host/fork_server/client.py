"""Runs a Python command in a fork whose imports are done.

    python -IS client.py DIRECTORY [OPTIONS] SCRIPT | -c CODE | -m MODULE [ARGUMENTS]

DIRECTORY is the server's. `auto`: the server that `SLIPSTREAM_FORK_SERVER` names, as in forks, else one of
the parent process: one per environment, started by the first client, stopped with the parent. The client
stands in for the command: it forwards signals and exits with its status; the kernel kills the fork when the
client exits.

Without a server it becomes an ordinary interpreter, whose environment has the reason (`REASON`). Standard
library only: it runs without site-packages.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

SOCKET = "socket"
RESERVED = "reserved"
LOG = "server.log"
SERVER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "server.py")
FAILED = "failed"
FAILED_S = 600.0  # then the imports are tried again
MODULES = "SLIPSTREAM_PRELOAD"
REASON = "SLIPSTREAM_NOT_FORKED"
SWITCH = "SLIPSTREAM_FORK_SERVER"  # "off": ordinary interpreters; or the directory of a server, as in forks
PREFIX = "/tmp/slipstream-fork"  # short: the path of a Unix socket has at most 107 bytes
READY_S = 55.0  # the imports take 8 to 45 s; Ray gives up on a worker that has not registered after 60
ANSWER_S = 20.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Variables that a fork can still apply, or that no import reads. All others select the server.
PER_PROCESS = {
    *(
        "OMP_NUM_THREADS",
        "VLLM_NO_USAGE_STATS",
        "VLLM_API_KEY",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_ENABLE_STARTUP_PLAN",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_MAX_COMPLETION_PROMPTS",
    ),
    *("CUDA_VISIBLE_DEVICES", "PWD", "OLDPWD", "SHLVL", "_"),
}
PER_PROCESS_PREFIXES = ("RAY_", "SLIPSTREAM_", "PYTEST_")
PLAIN_OPTIONS = ("-u", "-B", "-E", "-s", "-X", "-W")


class NoServer(Exception):
    """The command has to start without a server; the text has the reason."""


def main() -> None:
    directory, command = sys.argv[1], sys.argv[2:]
    os.environ.pop(REASON, None)
    try:
        if os.environ.get(SWITCH) == "off":
            raise NoServer(f"{SWITCH} is off")
        options = _options(command)
        if directory == "auto":
            directory = os.environ.get(SWITCH, "")
            if not _accepts(directory):
                directory = _own_directory()
                _ensure_server(directory)
        status = _run(directory, options, command)
    except (NoServer, OSError) as error:
        os.environ[REASON] = str(error)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.execv(sys.executable, [sys.executable, *command])
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _options(command: list[str]) -> int:
    count = 0
    while count < len(command) and command[count].startswith("-") and command[count] not in ("-c", "-m"):
        option = command[count]
        if not option.startswith(PLAIN_OPTIONS):
            raise NoServer(f"a fork cannot apply the interpreter's option {option}")
        count += 2 if option in ("-X", "-W") else 1
    if count == len(command):
        raise NoServer("expected a script, -c or -m; got an interactive interpreter")
    return count


def _own_directory() -> str:
    environment = {name: value for name, value in os.environ.items() if is_read_at_import(name)}
    identity = json.dumps([sys.executable, os.stat(__file__).st_mtime, sorted(environment.items())])
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    path = f"{PREFIX}-{os.getuid()}-{os.getppid()}-{key}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoServer(f"{path} belongs to user {found.st_uid} or is open to others")
    return path


def is_read_at_import(name: str) -> bool:
    """Whether another value needs another server."""
    if name == MODULES or name.startswith("RAY_SERVE_"):
        return True
    return name not in PER_PROCESS and not name.startswith(PER_PROCESS_PREFIXES)


def _ensure_server(directory: str) -> None:
    deadline = time.monotonic() + READY_S
    while not _accepts(directory):
        with contextlib.suppress(FileNotFoundError), open(f"{directory}/{FAILED}") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < FAILED_S:
                raise NoServer(file.read())
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _start_server(directory, lock)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
        if time.monotonic() > deadline:
            raise NoServer(f"the fork server was not ready within {READY_S:g} s")
        time.sleep(0.02)


def _accepts(directory: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"{directory}/{SOCKET}")
        except OSError:
            return False
    return True


def _start_server(directory: str, lock: int) -> None:
    # SWITCH comes first: see `_take_environment` in server.py.
    environment = {SWITCH: directory, **os.environ}
    environment[SWITCH] = directory
    with open(f"{directory}/{LOG}", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, SERVER, directory, str(os.getppid()), str(lock)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,
        )
    server.returncode = 0  # it outlives this process: subprocess must not warn


def _run(directory: str, options: int, command: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # cannot be forwarded yet
    lifeline, kept = os.pipe()  # the fork is killed by the kernel when `kept` is closed
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [each for each in descriptors if each not in (lifeline, kept) and _is_inherited(each)]
    with open(f"{directory}/{RESERVED}") as file:
        if taken := set(json.load(file)) & set(descriptors):
            raise NoServer(f"the imports have opened the descriptors {sorted(taken)} too")
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    request = {
        "command": command,
        "options": options,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": _umask(),
        "oom_score_adj": oom_score_adj.strip(),
        "descriptors": descriptors,
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(ANSWER_S)
        server.connect(f"{directory}/{SOCKET}")
        try:
            body = json.dumps(request).encode()
            fork_has = [lifeline, *descriptors]
            socket.send_fds(server, [struct.pack("qq", len(body), len(fork_has))], fork_has)
            server.sendall(body)
            _, (process,), _, _ = socket.recv_fds(server, 8, 1)
        except TimeoutError:
            _kill_peer(server)  # the next client starts a new one
            raise NoServer(f"the fork server did not answer within {ANSWER_S:g} s") from None
        except ValueError:
            raise NoServer("the fork server died") from None
        os.close(lifeline)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: signal.pidfd_send_signal(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        select.select([process], [], [])
        with contextlib.suppress(OSError, struct.error), server.makefile("rb") as answer:
            return int(struct.unpack("q", answer.read(8))[0])
        return 255  # the server, which alone knows the status, is gone


def _is_inherited(descriptor: int) -> bool:
    try:
        return not fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    except OSError:
        return False


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _kill_peer(server: socket.socket) -> None:
    pid = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
