import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.host.fork_server.client import FAILED, FAILED_S, MODULES, PREFIX, REASON, SERVER, SWITCH
from deployments.host.fork_server.use import CLIENT

pytestmark = pytest.mark.slow  # starts processes

# What a client or a server is started with, with another limit.
QUICK = "import sys; sys.path.insert(0, {folder!r}); import {module} as m; m.{name} = {value}; m.main()"
SHOW = (
    "import json, os, sys; print(json.dumps({'pid': os.getpid(), 'server': os.getppid(), 'argv': sys.argv,"
    f"'loaded': 'decimal' in sys.modules, 'reason': os.environ.get('{REASON}')}}))"
)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """One that no other test has, and so a server of its own."""
    made = {**os.environ, MODULES: "decimal", "OF_THIS_TEST": uuid.uuid4().hex}
    made.pop(SWITCH, None)
    before = set(directories())
    yield made
    for path in set(directories()) - before:
        server = server_of(path)
        if server is not None:
            os.kill(server, signal.SIGKILL)
        shutil.rmtree(path)


def directories() -> list[Path]:
    return list(Path("/tmp").glob(f"{Path(PREFIX).name}-{os.getuid()}-{os.getpid()}-*"))


def server_of(directory: Path) -> int | None:
    """Its process id, from the socket that it listens on."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(directory / "socket"))
        except OSError:
            return None
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def client(*command: str, **limits: float) -> list[str]:
    head = [str(CLIENT)]
    for name, value in limits.items():
        head = ["-c", QUICK.format(folder=str(CLIENT.parent), module="client", name=name, value=value)]
    return [sys.executable, "-IS", *head, "auto", *command]


def ran(
    command: list[str], environment: dict[str, str], status: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, **options)
    assert output.returncode == status, output.stderr
    return output


def shown(environment: dict[str, str], *arguments: str, **limits: float) -> dict[str, Any]:
    command = client("-c", SHOW, *arguments, **limits)
    made: dict[str, Any] = json.loads(ran(command, environment).stdout)
    return made


def started(environment: dict[str, str], code: str) -> tuple[subprocess.Popen[str], int]:
    """A client whose fork prints its process id and then runs `code`."""
    process = subprocess.Popen(
        client("-u", "-c", f"import os, signal, time; print(os.getpid()); {code}"),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


def test_clients_share_one_server_whose_imports_are_done(environment: dict[str, str]) -> None:
    first, second = shown(environment, "a", "b"), shown(environment)
    assert first["server"] == second["server"] != os.getpid()
    assert first["loaded"] and first["reason"] is None
    assert first["argv"] == ["-c", "a", "b"]


def test_another_environment_has_another_server_but_for_what_a_fork_can_apply(
    environment: dict[str, str],
) -> None:
    server = shown(environment)["server"]
    assert shown({**environment, "OMP_NUM_THREADS": "7", "RAY_JOB_ID": "1"})["server"] == server
    assert shown({**environment, "VLLM_LOGGING_LEVEL": "DEBUG"})["server"] != server


def test_a_server_that_is_named_is_used_while_it_lives(environment: dict[str, str]) -> None:
    server = shown(environment)["server"]
    (directory,) = (each for each in directories() if server_of(each) == server)
    other = {**environment, "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert shown({**other, SWITCH: str(directory)})["server"] == server
    os.kill(server, signal.SIGKILL)
    assert shown({**other, SWITCH: str(directory)})["server"] not in (server, os.getpid())


def test_a_command_sees_its_clients_files_folder_environment_and_descriptors(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(sys.stdin.read(), os.getcwd(), sys.argv[1:], os.environ['MINE'], __name__, __file__)\n"
        "os.write(int(sys.argv[1]), b'over the pipe')\n"
        "print('an error', file=sys.stderr)\n"
        "sys.exit(5)\n"
    )
    read, write = os.pipe()
    command = client("-u", str(script), str(write))
    given: dict[str, Any] = {"cwd": tmp_path, "input": "from stdin", "pass_fds": [write]}
    output = ran(command, {**environment, "MINE": "yes"}, 5, **given)
    os.close(write)
    assert output.stdout == f"from stdin {tmp_path} ['{write}'] yes __main__ {script}\n"
    assert output.stderr == "an error\n"
    assert os.read(read, 100) == b"over the pipe"
    os.close(read)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit('a reason')", 1, "a reason"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
        ("import threading, time; threading.Timer(0.2, lambda: print('late')).start()", 0, "late"),
    ],
)
def test_a_command_ends_as_in_an_interpreter(
    environment: dict[str, str], code: str, status: int, words: str
) -> None:
    output = ran(client("-c", code), environment, status)
    assert words in output.stdout + output.stderr


def test_signals_reach_the_fork(environment: dict[str, str]) -> None:
    process, _ = started(environment, "time.sleep(60)")
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process, _ = started(environment, "time.sleep(60)")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 1
    assert process.stderr is not None and "KeyboardInterrupt" in process.stderr.read()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fork_dies_with_its_client_also_if_it_is_stopped(
    environment: dict[str, str], stopped: bool
) -> None:
    process, fork = started(environment, "time.sleep(60)")
    if stopped:
        os.kill(fork, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert gone(fork)


def test_forks_outlive_a_server_that_dies_and_the_next_client_starts_another(
    environment: dict[str, str],
) -> None:
    server = shown(environment)["server"]
    process, fork = started(environment, "input(); print('done')")
    os.kill(server, signal.SIGKILL)
    assert gone(server)
    after = shown(environment)
    assert after["reason"] is None and after["server"] != server
    assert process.poll() is None and not gone(fork, 0.1)
    output, _ = process.communicate("\n", timeout=60)
    assert output == "done\n"
    assert process.returncode == 255  # only the server could have known


def test_a_server_that_hangs_is_replaced(environment: dict[str, str]) -> None:
    server = shown(environment)["server"]
    os.kill(server, signal.SIGSTOP)
    cold = shown(environment, ANSWER_S=0.5)
    assert "did not answer within 0.5 s" in cold["reason"]
    assert not cold["loaded"]
    assert gone(server)
    after = shown(environment)
    assert after["reason"] is None and after["server"] != server


def test_imports_that_fail_or_start_threads_leave_ordinary_interpreters(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    environment["PYTHONPATH"] = str(tmp_path)
    for modules, reason in {"no_such_module": "No module named", "threaded": "expected one thread"}.items():
        for _ in range(2):  # the second one does not try again
            cold = shown({**environment, MODULES: modules})
            assert reason in cold["reason"]
            assert cold["argv"] == ["-c"]


def test_imports_that_have_failed_are_tried_again_later(environment: dict[str, str], tmp_path: Path) -> None:
    """What was wrong, as a full disk or a missing package, may be mended by then."""
    environment |= {"PYTHONPATH": str(tmp_path), MODULES: "mended"}
    assert "No module named" in shown(environment)["reason"]
    (tmp_path / "mended.py").touch()
    assert "No module named" in shown(environment)["reason"]
    (failed,) = [path / FAILED for path in directories() if (path / FAILED).exists()]
    os.utime(failed, (time.time() - FAILED_S,) * 2)
    assert shown(environment)["reason"] is None


def test_files_that_imports_keep_open_leave_the_low_numbers_to_clients(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "opening.py").write_text(
        "import os; kept = [os.open('/dev/zero', os.O_RDONLY) for _ in range(9)]\n"
        "def intact(): return all(os.read(each, 1) == bytes(1) for each in kept)"
    )
    environment |= {"PYTHONPATH": str(tmp_path), MODULES: "opening"}
    (tmp_path / "mine").write_text("mine")
    code = f"{SHOW}; import opening; assert opening.intact(); assert os.pread(3, 4, 0) == b'mine'"
    inheriting = ["sh", "-c", 'exec 3<"$0" 4<"$0" 5<"$0" 6<"$0"; exec "$@"', str(tmp_path / "mine")]
    output = ran([*inheriting, *client("-c", code)], environment)
    assert json.loads(output.stdout)["reason"] is None


def test_a_descriptor_that_an_import_has_opened_is_not_replaced(
    environment: dict[str, str], tmp_path: Path
) -> None:
    read, write = os.pipe()
    ours = fcntl.fcntl(write, fcntl.F_DUPFD, 77)  # not dup2: another test's file may have the number
    (tmp_path / "opening.py").write_text(f"import os; os.dup2(os.open('/dev/null', os.O_RDONLY), {ours})")
    environment |= {"PYTHONPATH": str(tmp_path), MODULES: "opening"}
    assert shown(environment)["reason"] is None
    output = ran(client("-c", SHOW), environment, pass_fds=[ours])
    for each in (read, write, ours):
        os.close(each)
    assert f"descriptors [{ours}]" in json.loads(output.stdout)["reason"]


def test_what_a_fork_cannot_apply_and_a_switch_leave_ordinary_interpreters(
    environment: dict[str, str],
) -> None:
    assert "is off" in shown({**environment, SWITCH: "off"})["reason"]
    output = ran(client("-O", "-c", SHOW), environment)
    assert "-O" in json.loads(output.stdout)["reason"]


def test_a_server_stops_when_it_is_idle_and_when_its_owner_has_stopped(
    environment: dict[str, str], tmp_path: Path
) -> None:
    owner = subprocess.Popen(["sleep", "60"])
    code = QUICK.format(folder=str(CLIENT.parent), module="server", name="IDLE_S", value=0.2)
    started = {}
    for name, program in {"idle": ["-c", code], "owned": [SERVER], "told": [SERVER]}.items():
        directory = tmp_path / name
        directory.mkdir()
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
        command = [sys.executable, *program, str(directory), str(owner.pid), str(lock)]
        started[directory] = subprocess.Popen(command, env=environment, pass_fds=[lock])
        os.close(lock)
    idle, owned, told = started
    assert started[idle].wait(10) == 0
    assert not idle.exists()
    while server_of(owned) is None or server_of(told) is None:
        time.sleep(0.01)
    started[told].terminate()
    assert started[told].wait(10) == 0
    assert not told.exists()
    owner.kill()
    owner.wait()
    assert started[owned].wait(10) == 0
    assert not owned.exists()


def test_what_multiprocessing_spawns_in_a_fork_is_a_fork_too(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """As vLLM spawns its engine core, and that its workers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os\n"
        "def identity(queue, more):\n"
        "    queue.put((os.getppid(), multiprocessing.parent_process().pid))\n"
        "    if more: start(queue, 0)\n"
        "def start(queue, more):\n"
        "    child = multiprocessing.get_context('spawn').Process(target=identity, args=(queue, more))\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
        "if __name__ == '__main__':\n"
        "    queue = multiprocessing.get_context('spawn').Queue()\n"
        "    start(queue, 1)\n"
        "    (server, parent), (also, other) = queue.get(), queue.get()\n"
        "    assert parent == os.getpid() != other\n"
        "    assert server == also == os.getppid(), (server, also, os.getppid())\n"
    )
    ran(client(str(script)), environment)


@pytest.mark.long
def test_hundreds_of_forks_leave_a_server_as_it_was(environment: dict[str, str]) -> None:
    (server,) = [psutil.Process(shown(environment)["server"])]
    for _ in range(20):
        shown(environment)
    before = server.num_fds(), server.memory_info().rss
    for _ in range(200):
        subprocess.run(client("-c", "pass"), env=environment, timeout=60, check=True)
    deadline = time.monotonic() + 10
    while server.num_fds() > before[0] and time.monotonic() < deadline:  # the last client's is being closed
        time.sleep(0.01)
    assert server.num_fds() <= before[0]
    assert server.memory_info().rss - before[1] < 1 << 20
    assert server.children() == []


def test_the_imports_of_an_engine_leave_a_process_that_can_fork(environment: dict[str, str]) -> None:
    """vLLM's and torch's, and what they have read of the environment is that of the command."""
    del environment[MODULES]
    code = (
        "import json, sys, threading, torch\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))\n"
        "thread.start(); thread.join()\n"
        "import numpy\n"
        "from ray._raylet import JobID, TaskID\n"
        "task = TaskID.for_fake_task(JobID.from_int(1)).hex()\n"  # Ray's random state is its extension's own
        "print(json.dumps([torch.get_num_threads(), *seen, 'vllm.v1.engine.core' in sys.modules,"
        "torch.cuda.is_initialized(), float(numpy.random.random()), task]))\n"
    )
    results = []
    for threads in ("1", "2"):
        output = ran(client("-c", code), {**environment, "OMP_NUM_THREADS": threads})
        *result, random_number, task = json.loads(output.stdout.splitlines()[-1])
        assert result == [int(threads), int(threads), True, False]
        results.append((random_number, task))
    assert all(first != second for first, second in zip(*results, strict=True))
