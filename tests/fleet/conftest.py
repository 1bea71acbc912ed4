"""Fixtures of the tests with real fleets."""

from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.adapter_fleet import Adapted
from tests.fleet.adapter_talk import unload


@pytest.fixture
def client(adapted: Adapted) -> Iterator[httpx.Client]:
    with adapted.fleet.client() as made:
        yield made
        for name in {each["name"] for each in made.get("/fleet/adapters").json()["adapters"]}:
            unload(made, name)
