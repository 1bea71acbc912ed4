"""Fixtures of the tests with real fleets."""

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import ray

from tests.chaos.launching import Launched
from tests.fleet.adapter_fleet import Adapted
from tests.fleet.deployed import Fleet
from tests.fleet.keeping import pytest_runtest_teardown as pytest_runtest_teardown
from tests.fleet.keeping import pytest_sessionfinish as pytest_sessionfinish

LINES = 40
ASK_S = 10.0


def serve_logs() -> Path:
    """Where the processes of this process's cluster write Serve's logs."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")


def last_events(client: httpx.Client) -> str:
    """The newest of `/fleet/events`, or why it does not answer."""
    lines: list[str] = []
    deadline = time.monotonic() + ASK_S
    try:
        with client.stream("GET", "/fleet/events?since=0", timeout=3.0) as answer:
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                if time.monotonic() > deadline:
                    break
    except httpx.ReadTimeout:  # there are no more
        pass
    except httpx.HTTPError as error:
        lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines[-LINES:])


def last_warnings() -> str:
    """The newest warnings and errors in Serve's logs; another test process may have a cluster of its own."""
    lines: list[str] = []
    for path in serve_logs().glob("*.log") if ray.is_initialized() else ():
        with suppress(OSError):
            text = path.read_text(errors="replace")
            lines += [
                f"{line}  [{path.stem}]" for line in text.splitlines() if line.startswith(("WARN", "ERROR"))
            ]
    return "\n".join(sorted(lines, key=lambda line: line.split()[1:3])[-LINES:])


@pytest.fixture
def client(adapted: Adapted) -> Iterator[httpx.Client]:
    """Of the fleet with adapters; those that were loaded are unloaded."""
    with adapted.fleet.client(timeout_s=300) as made:
        yield made
        for name in {each["name"] for each in made.get("/fleet/adapters").json()["adapters"]}:
            made.post("/v1/unload_lora_adapter", json={"lora_name": name})


@pytest.fixture
def gloo(adapted: Adapted) -> Fleet:
    """Of the fleet with adapters what has nothing to do with them."""
    return adapted.fleet


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what the fleet has seen: a lost replica is known there, and nowhere else."""
    report = yield
    if report.failed and call.when == "call":
        fleets = [
            value.fleet if isinstance(value, Adapted) else value
            for value in getattr(item, "funcargs", {}).values()
            if isinstance(value, Fleet | Adapted | Launched)
        ]
        if fleets:
            with fleets[0].client() as client:
                report.sections.append(("The fleet's last events", last_events(client)))
            report.sections.append(("Last warnings in Serve's logs", last_warnings()))
    return report
