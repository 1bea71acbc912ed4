"""A client that has only an address carries its token there: on every route, with several HTTP clients."""

import asyncio
import ssl
from collections.abc import Callable, Iterator

import aiohttp
import httpx
import pytest
import requests
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from app.http.auth import Access, passed_access
from deployments.protocol.passed_routes import PASSED
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
def served() -> Iterator[tuple[str, list[tuple[str, str, Access]]]]:
    """Host and port, and every route with whom it is for."""
    app = application(FakeController(), trainer=FakeTrainer(), token=OPERATOR, user_token=USER)
    passed = [
        (method, path.replace("{response_id}", "resp_1"), passed_access(path))
        for path, methods in PASSED.items()
        for method in methods
    ]
    own = []
    with on_a_socket(app) as address:
        document = httpx.get(f"http://{address}/openapi.json", headers=bearer(OPERATOR)).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                own.append((method.upper(), path, _access(operation, address, method.upper(), path)))
        # The document itself is made anew for each request, which takes long.
        found = [
            *own,
            *(each for each in passed if each[1] != "/openapi.json"),
            ("GET", "/", Access.OPERATOR),
        ]
        yield address, found


def _access(operation: dict[str, object], address: str, method: str, path: str) -> Access:
    if "security" not in operation:
        return Access.OPEN
    with httpx.stream(method, f"http://{address}{path}", headers=bearer(USER)) as answer:
        return Access.OPERATOR if answer.status_code == 403 else Access.USER


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.slow
@pytest.mark.parametrize("ask", [with_requests, with_httpx, with_aiohttp])
def test_every_route_takes_it(served: tuple[str, list[tuple[str, str, Access]]], ask: Client) -> None:
    address, routes = served
    assert {access for _, _, access in routes} == set(Access) and len(routes) > 60
    for method, path, access in routes:
        users = ask(method, f"http://x:{QUOTED['user']}@{address}{path}")
        operators = ask(method, f"http://x:{QUOTED['operator']}@{address}{path}")
        assert (users == 403) is (access is Access.OPERATOR), (method, path, users)
        assert users != 401 and operators not in (401, 403), (method, path, users, operators)


@pytest.mark.slow
def test_vllms_own_client_drives_a_fleet_with_it(
    served: tuple[str, list[tuple[str, str, Access]]],
) -> None:
    address, _ = served
    HTTPVLLMWeightSyncClient(f"http://x:{QUOTED['operator']}@{address}").start_weight_update()
    with pytest.raises(requests.HTTPError, match="401"):
        HTTPVLLMWeightSyncClient(f"http://{address}").finish_weight_update()
