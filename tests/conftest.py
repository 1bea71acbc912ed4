"""What every test of the project shares."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

# As `slipstream serve` sets it. With Ray's 15, an engine that started beside another test process on the same
# two cores took 527 s instead of 35.
os.environ.setdefault("RAY_worker_niceness", "0")

# torch asks a name server for the name of who connects to its stores. One that loses a question stops a store
# for this long; five seconds and two attempts without it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Fixtures of several folders. What is imported here is imported for every single test.
from deployments.host.fork_server.client import SWITCH
from deployments.host.shared_memory import disown, remove_orphans
from tests.cpu_times import CpuTimes
from tests.fake_hub import hub as hub
from tests.fleet.adapter_fleet import adapted as adapted
from tests.fleet.session_fleet import fleet as fleet
from tests.forked import IN_A_FORK, has_cuda

# An example is no timed test: on a busy core any of them takes longer than hypothesis's 200 ms now and then.
if find_spec("hypothesis") is not None:  # machines with GPUs, which run the `gpu` tests, do not have it
    from hypothesis import HealthCheck, settings

    # The same examples for the same revision, so that a change is judged by what it changes; `make test-all`
    # takes random ones, and more of them.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("slipstream", patient, derandomize=True, max_examples=30)
    settings.register_profile("search", patient, derandomize=False, max_examples=1_000, print_blob=True)
    settings.load_profile("slipstream")

WITH_RAY_S = 400.0  # of a test that starts Ray or an engine, beside others that do, and states nothing else
FLEETS = ("shared", "gloo", "launched", "ray")  # those of `make test`, the longest first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", action="store_true", help="print the processor time of each folder's tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, and stays: to look through it is a quarter of what collection costs
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(), "cpu_times")


def _scope(item: pytest.Item) -> str:
    """What stays in one process, in order: the tests of a fleet, which their mark names, or of a file."""
    mark = item.get_closest_marker("fleet")
    if mark is not None:
        return str(mark.args[0])
    return item.nodeid.split("::", 1)[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Generator[None]:
    """The process that schedules collects nothing and sees node ids alone: those it is sent end in the scope.

    xdist 3.8 does the same for its own marks by `_nodeid`, which the items of pytest 9.2 do not have.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else nanobind reports all that it has as leaked
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the operations are tiny, and two processes share two cores
    # pytest adds its handlers to each logger that stops here, six times a test: torch alone has eighty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    items = session.items
    if hasattr(session.config, "workerinput"):
        session.items = [SimpleNamespace(nodeid=f"{item.nodeid}@{_scope(item)}") for item in items]
    yield
    session.items = items


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Where this process is a fork, xdist's are forks too."""
    if IN_A_FORK:
        for spec in specs:
            spec.python = f"{os.environ[SWITCH]}/python"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            """At most two processes have fleets. Others run files, while there are some, which use the time
            that fleets wait."""
            files = next((scope for scope in self.workqueue if "/" in scope), None)
            if files is not None and self.nodes.index(node) >= 2:
                self.workqueue.move_to_end(files, last=False)
            super()._assign_work_unit(node)

        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("@")[2]

    return ByScope(config, log)


@pytest.hookimpl(trylast=True)  # xdist's own hook ends its processes
def pytest_sessionfinish() -> None:
    """Leave nothing in shared memory: xdist's processes end without Python's exit, and some tests kill who
    owns names, which the next one to start a fleet would remove."""
    disown()
    remove_orphans()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fleets first, one after the other, since they take longest; more time for tests that start Ray; skip
    what is marked `gpu` where there is none."""
    order = {name: place for place, name in enumerate(FLEETS)}
    for item in items:
        if item.get_closest_marker("fleet") is not None:
            order.setdefault(_scope(item), len(order))
    items.sort(key=lambda item: order.get(_scope(item), len(order)))
    for item in items:
        if item.get_closest_marker("serve") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(WITH_RAY_S))
    if not has_cuda():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
