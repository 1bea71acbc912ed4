"""`pytest -p tests.forks --forks N`: each test file is collected in one process, whose N forks run its tests.

pytest-xdist imports and collects everything again in each of its processes, which takes longer than most
tests. Here one process collects what imports vLLM, and a second one the rest meanwhile. Their forks take file
after file. Tests with Ray or CUDA need xdist: neither can be used in a fork of a process that has used it.
"""

import os
import struct
import time
from collections.abc import Generator, Iterator
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.host.fork_server.server import BEFORE_IMPORTS, die_with

# The beginnings of paths below tests/. A file that imports vLLM and is missing here costs time only.
WITH_VLLM = (
    "app/command/test_cli",
    "app/command/test_live_in_serve",
    "app/http/test_auth",
    "app/http/test_openapi",
    "app/http/test_same_as_vllm",
    "app/settings/",
    "app/test_",
    "chaos/",
    "deployments/protocol/test_passed_routes",
    "deployments/replica/",
    "deployments/router/test_scrape",
    "deployments/test_",
    "deployments/trainer/",
    "deployments/weights/",
    "examples/",
    "slipstream/",
    "trainers/",
)
SCOPE = struct.Struct("H")
TESTS = Path(__file__).parent
# Of a report: the terminal then names no files, which would take turns.
AS_XDIST = SimpleNamespace(gateway=SimpleNamespace(id="fork"), _workerinfocache="")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run tests in as many forks of each collection")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks and not config.option.collectonly:
        os.environ.update(BEFORE_IMPORTS)  # no threads
        config.pluginmanager.register(Forks(config), "forks")


class Forks:
    """In the first process: starts those that collect, and reports what they send."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._running: dict[Connection, str] = {}  # with the test that each is at

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        for with_vllm in (True, False):
            pipes = [Pipe(duplex=False) for _ in range(self._config.option.forks)]
            if _fork() == 0:
                self._config.pluginmanager.unregister(self)
                worker = Worker(session, with_vllm, [theirs for _, theirs in pipes])
                self._config.pluginmanager.register(worker)
                return
            for ours, theirs in pipes:
                theirs.close()
                self._running[ours] = "its collection"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while self._running:
            for connection in wait(list(self._running)):
                try:
                    kind, content = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    at = self._running.pop(connection)  # type: ignore[arg-type]
                    if at:
                        raise pytest.exit.Exception(f"a process of the tests died in {at}", 3) from None
                    continue
                self._received(session, connection, kind, content)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        return True

    def _received(self, session: pytest.Session, connection: Any, kind: str, content: Any) -> None:
        hook = self._config.hook
        if kind == "at":
            self._running[connection] = content
        elif kind == "refused":
            raise pytest.UsageError(content)
        elif kind == "collected":
            session.testscollected += content["tests"]
            if (cpu_times := self._config.pluginmanager.get_plugin("cpu_times")) is not None:
                cpu_times.collected(content["used_s"])
        else:
            report = hook.pytest_report_from_serializable(config=self._config, data=content)
            if kind == "test":
                report.node = AS_XDIST
                hook.pytest_runtest_logreport(report=report)
            else:
                hook.pytest_collectreport(report=report)


class Worker:
    """In a process that collects, and in its forks: runs tests, and sends what became of them."""

    def __init__(self, session: pytest.Session, with_vllm: bool, connections: list[Connection]) -> None:
        self._config = session.config
        self._with_vllm = with_vllm
        self._connections = connections
        self._connection = connections[0]
        self._capture_alone()
        self._config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    def _capture_alone(self) -> None:
        """Not in the files of the process that forked."""
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        assert capture is not None
        capture.suspend_global_capture()
        capture.stop_global_capturing()
        capture.start_global_capturing()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except pytest.UsageError as error:  # an argument that is no test
            self._send("refused", str(error))
            raise

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if not collection_path.is_relative_to(TESTS):
            return None
        path = collection_path.relative_to(TESTS).as_posix() + ("" if collection_path.suffix else "/")
        above = path == "./" or any(each != path and each.startswith(path) for each in WITH_VLLM)
        return None if above or self._is_ours(collection_path) else True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_ours(item.path)]  # arguments are not ignored

    def _is_ours(self, path: Path) -> bool:
        name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
        return (name + "/").startswith(WITH_VLLM) == self._with_vllm

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._send("collection", self._serialized(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send("at", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("test", self._serialized(report))

    def _serialized(self, report: pytest.CollectReport | pytest.TestReport) -> Any:
        return self._config.hook.pytest_report_to_serializable(config=self._config, report=report)

    def _send(self, kind: str, content: Any) -> None:
        self._connection.send((kind, content))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._send("collected", {"tests": len(session.items), "used_s": time.process_time()})
        files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
        numbers, ours = os.pipe()  # of the files that no fork has begun
        os.write(ours, b"".join(SCOPE.pack(number) for number in range(len(files))))
        os.close(ours)
        forks = []
        for connection in self._connections[1:]:
            fork = _fork()
            if fork == 0:
                forks.clear()
                self._connection = connection
                self._capture_alone()
                self._begin()
                break
            forks.append(fork)
        for connection in self._connections:
            if connection is not self._connection:
                connection.close()
        self._run(session, _files(numbers, files))
        self._send("at", "")
        for fork in forks:
            os.waitpid(fork, 0)
        return True

    def _begin(self) -> None:
        cpu_times = self._config.pluginmanager.get_plugin("cpu_times")
        if cpu_times is not None:
            cpu_times.begin()  # a fork has used nothing

    def _run(self, session: pytest.Session, items: Iterator[pytest.Item]) -> None:
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        os._exit(0)  # what the process that forked has registered for its exit is not to be done here


def _files(numbers: int, files: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    while number := os.read(numbers, SCOPE.size):
        yield from files[SCOPE.unpack(number)[0]]


def _fork() -> int:
    """As `os.fork`, and the kernel kills the child when this process ends."""
    died, lifeline = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(lifeline)
        die_with(died)
    else:
        os.close(died)
    return pid
