"""Fixtures of the tests with real fleets."""

from collections.abc import Generator, Iterator

import httpx
import pytest

from tests.fleet.adapter_fleet import Adapted
from tests.fleet.adapter_talk import unload
from tests.fleet.failure_report import last_events, last_warnings
from tests.fleet.session_fleet import Fleet


@pytest.fixture
def client(adapted: Adapted) -> Iterator[httpx.Client]:
    with adapted.fleet.client() as made:
        yield made
        for name in {each["name"] for each in made.get("/fleet/adapters").json()["adapters"]}:
            unload(made, name)


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
            if isinstance(value, Fleet | Adapted)
        ]
        if fleets:
            report.sections.append(("The fleet's last events", last_events(fleets[0].url)))
            report.sections.append(("Last warnings in Serve's logs", last_warnings()))
    return report
