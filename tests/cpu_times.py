"""Processor time by test and by folder, printed at the end: `pytest --cpu-times`, with xdist and --forks too.

User and system time of the tests' processes and of the children that they have waited for: those of a fleet
count where it ends. The fork server's imports do not count.
"""

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests import forked

MOST = 20  # tests that are named


def used_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + forked.cpu_s()


def group_of(nodeid: str) -> str:
    """The folder below tests, or below tests/deployments."""
    folders = PurePosixPath(nodeid.split("::", 1)[0]).parts[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ("deployments",) else 2])


class CpuTimes:
    def __init__(self) -> None:
        self._before_s = 0.0
        self._collection_s: list[float] = []  # of each process
        self._tests: Counter[str] = Counter()
        self._spent_s: Counter[str] = Counter()
        self._of_test_s: Counter[str] = Counter()

    def begin(self) -> None:
        self._before_s = used_s()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.begin()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collection_s"] = self._before_s
        elif session.items:
            self.collected(self._before_s)

    def collected(self, used_s: float) -> None:
        self._collection_s.append(used_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.collected(getattr(node, "workeroutput", {}).get("collection_s", 0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = used_s()
        report.cpu_s, self._before_s = now - self._before_s, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        group = group_of(report.nodeid)
        self._tests[group] += report.when == "call"
        self._spent_s[group] += getattr(report, "cpu_s", 0.0)
        self._of_test_s[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(self._spent_s.values()) + sum(self._collection_s)
        terminalreporter.section("processor time")
        for nodeid, spent_s in self._of_test_s.most_common(MOST):
            terminalreporter.line(f"{spent_s:8.1f} s {nodeid}")
        for group, spent_s in self._spent_s.most_common():
            terminalreporter.line(f"{spent_s:8.1f} s {self._tests[group]:6} tests  {group}")
        each = ", ".join(f"{each:.1f}" for each in self._collection_s)
        terminalreporter.line(f"{sum(self._collection_s):8.1f} s collection ({each})")
        terminalreporter.line(f"{total_s:8.1f} s in all")
