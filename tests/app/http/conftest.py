from collections.abc import AsyncIterator

import httpx
import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
async def fleet(controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the routes over `controller`."""
    async with client(controller) as made:
        yield made
