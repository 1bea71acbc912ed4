"""Fixtures of the tests with real fleets."""

from collections.abc import Generator, Iterator

import httpx
import pytest

from tests.chaos.launching import Launched
from tests.fleet.adapter_fleet import Adapted
from tests.fleet.deployed import Fleet
from tests.fleet.failure_report import last_events, last_warnings
from tests.fleet.keeping import pytest_runtest_teardown as pytest_runtest_teardown
from tests.fleet.keeping import pytest_sessionfinish as pytest_sessionfinish


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
