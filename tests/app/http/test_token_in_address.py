"""A client that has only an address carries its token there, with several HTTP clients."""

import asyncio
import ssl
from collections.abc import Callable, Iterator

import aiohttp
import httpx
import pytest
import requests
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.serving import application, on_a_socket

# With what a URL has to escape.
OPERATOR, USER = "operator/0123:456789@%41?#", "user-0123456789abcdef"
QUOTED = {"operator": "operator%2F0123%3A456789%40%2541%3F%23", "user": USER}
TLS = ssl.create_default_context()  # httpx makes one for each client, though none is used

Client = Callable[[str, str], int]  # method, address: the answer's status


def with_requests(method: str, address: str) -> int:
    session = requests.Session()  # as TRL has one
    with session.request(method, address, timeout=20, stream=True) as answer:
        return answer.status_code


def with_httpx(method: str, address: str) -> int:
    with httpx.Client(timeout=20, verify=TLS) as client, client.stream(method, address) as answer:
        return answer.status_code


def with_aiohttp(method: str, address: str) -> int:
    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.request(method, address) as answer:
            return answer.status

    return asyncio.run(ask())  # as SkyRL


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    app = application(FakeController(), trainer=FakeTrainer(), token=OPERATOR, user_token=USER)
    with on_a_socket(app) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("ask", [with_requests, with_httpx, with_aiohttp])
def test_routes_take_the_token_of_the_address(address: str, ask: Client) -> None:
    for path in ("/v1/models", "/fleet", "/train/status", "/"):
        assert ask("GET", f"http://x:{QUOTED['operator']}@{address}{path}") == 200
        assert ask("GET", f"http://x:{QUOTED['user']}@{address}{path}") == (
            200 if path == "/v1/models" else 403
        )
        assert ask("GET", f"http://{address}{path}") == 401


@pytest.mark.slow
def test_vllms_own_client_drives_a_fleet_with_it(address: str) -> None:
    HTTPVLLMWeightSyncClient(f"http://x:{QUOTED['operator']}@{address}").start_weight_update()
    with pytest.raises(requests.HTTPError, match="401"):
        HTTPVLLMWeightSyncClient(f"http://{address}").finish_weight_update()
