"""Which routes need which token, how it may be carried, and where it never appears."""

import asyncio
import base64
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
import requests
from starlette.requests import Request
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from app.http import auth
from app.http.auth import Access, Forbidden, Guard, Unauthorized
from app.settings.security import Tokens, TokenSource
from deployments.host.logs import serve_logger
from deployments.protocol.passed_routes import PASSED
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import application, client, on_a_socket, tokens

OPERATOR, USER = "operator-0123456789", "user-0123456789abcdef"
USERS_ROUTES = [
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/openapi.json"),
    ("POST", "/inference/v1/generate"),
]
OPERATORS_ROUTES = [
    ("GET", "/fleet"),
    ("GET", "/fleet/rounds"),
    ("GET", "/fleet/versions"),
    ("GET", "/fleet/events"),
    ("GET", "/metrics"),
    ("POST", "/fleet/rollback"),
    ("POST", "/pause"),
    ("GET", "/is_paused"),
    ("GET", "/weight_info"),
    ("GET", "/get_world_size"),
    ("POST", "/update_weights"),
    ("POST", "/train/step"),
    ("GET", "/train/status"),
    ("GET", "/server_info"),
    ("GET", "/fleet/adapters"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
]
UNKNOWN_ROUTES = [("POST", "/collective_rpc"), ("GET", "/no/such/route"), ("GET", "/pause")]


def basic(password: str, user: str = "x") -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


Status = Callable[[tuple[str, str], dict[str, str]], Awaitable[int]]


@asynccontextmanager
async def statuses(user: str | None = USER) -> AsyncIterator[Status]:
    """What a request of a route with some headers is answered by one fleet."""
    controller = FakeController()
    async with client(controller, token=OPERATOR, user_token=user) as fleet:

        async def status(route: tuple[str, str], headers: dict[str, str]) -> int:
            controller.calls.clear()
            request = fleet.build_request(*route, headers=headers, content=b"{not even JSON")
            code = (await fleet.send(request)).status_code
            assert code not in (401, 403) or controller.calls == []
            return code

        yield status


NO_TOKEN = [
    {},
    bearer("other"),
    basic("other"),
    {"authorization": "Basic !!"},
    {"authorization": OPERATOR},
    {"x-api-key": "other"},
]


async def test_without_a_token_only_health_answers() -> None:
    async with statuses() as status:
        for headers in NO_TOKEN:
            for route in USERS_ROUTES + OPERATORS_ROUTES:
                assert await status(route, headers) == 401, (route, headers)
            assert await status(("GET", "/health"), headers) == 200, headers


async def test_routes_are_not_revealed_without_a_token() -> None:
    async with statuses() as status:
        for route in UNKNOWN_ROUTES:
            assert await status(route, {}) == 401, route
            assert await status(route, bearer(USER)) in (404, 405), route


@pytest.mark.slow
async def test_users_routes_take_both_tokens() -> None:
    async with statuses() as status:
        for token in (USER, OPERATOR):
            for headers in (
                bearer(token),
                basic(token),
                {"authorization": f"bearer {token}"},
                {"x-api-key": token},  # of Anthropic's clients
            ):
                for route in USERS_ROUTES:
                    assert await status(route, headers) == 200, (route, headers)


async def test_operators_routes_are_not_for_users() -> None:
    async with statuses() as status:
        for route in OPERATORS_ROUTES:
            assert await status(route, bearer(USER)) == 403, route
            assert await status(route, basic(USER)) == 403, route
            if route[1] != "/fleet/events":  # it does not end
                assert await status(route, basic(OPERATOR)) not in (401, 403), route


@pytest.mark.slow
async def test_users_need_no_token_where_none_is_configured() -> None:
    async with statuses(user=None) as status:
        for route in USERS_ROUTES:
            assert await status(route, {}) == 200, route
        assert await status(("POST", "/pause"), {}) == 401


@pytest.mark.slow
async def test_every_forwarded_route_needs_a_token() -> None:
    async with statuses() as status:
        for path, methods in PASSED.items():
            for method in methods:
                route = method, path.replace("{response_id}", "resp_1")
                assert (await status(route, {}), await status(route, bearer(OPERATOR))) == (401, 200), route


async def test_browser_is_told_to_ask_for_it() -> None:
    async with client(FakeController(), token=OPERATOR) as fleet:
        answer = await fleet.get("/fleet")
        by_page = await fleet.get("/fleet", headers={"x-requested-with": "Slipstream"})
    assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic realm=")
    assert by_page.status_code == 401 and "www-authenticate" not in by_page.headers, "the page asks itself"
    assert answer.json()["error"]["type"] == "unauthorized"
    assert "needs the operator's token" in answer.json()["error"]["message"]


async def test_prefix_of_an_application_opens_and_closes_nothing() -> None:
    async with client(FakeController(), token=OPERATOR, user_token=USER, root_path="/prefix") as fleet:
        assert (await fleet.get("/prefix/health")).status_code == 200
        assert (await fleet.get("/prefix/fleet")).status_code == 401
        assert (await fleet.get("/prefix/metrics", headers=basic(OPERATOR))).status_code == 200
        assert (await fleet.get("/prefix/v1/models", headers=bearer(USER))).status_code == 200
        assert (await fleet.post("/prefix/pause", headers=bearer(USER))).status_code == 403
        assert (await fleet.post("/prefix/collective_rpc", headers=bearer(OPERATOR))).status_code == 404


# -- other web pages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "host", "origin", "expected"),
    [
        (OPERATOR, "fleet:8000", "http://fleet:8000", 200),
        (OPERATOR, "fleet:8000", "http://evil.example", 403),
        (OPERATOR, "fleet:8000", "null", 403),
        (None, "127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        (None, "localhost:8000", "http://localhost:8000", 200),
        (None, "[::1]:8000", "http://[::1]:8000", 200),
        (None, "127.0.0.1:8000", "http://evil.example", 403),
        (None, "evil.example:8000", "http://evil.example:8000", 403),  # its name leads to 127.0.0.1
        (OPERATOR, "fleet:8000", "http://[", 403),
        (None, "[", "http://[", 403),
    ],
)
async def test_another_origin_cannot_drive_the_fleet(
    token: str | None, host: str, origin: str, expected: int
) -> None:
    async with client(FakeController(), token=token) as fleet:
        headers = {"host": host, "origin": origin} | (basic(token) if token else {})
        assert (await fleet.post("/pause", headers=headers)).status_code == expected
        assert (await fleet.get("/fleet", headers=headers)).status_code == 200


async def test_page_behind_a_proxy_that_changes_the_host_needs_the_token_in_its_requests() -> None:
    """A browser adds Basic credentials by itself, and never a Bearer token."""
    async with client(FakeController(), token=OPERATOR) as fleet:
        headers = {"host": "127.0.0.1:8000", "origin": "https://rl.example"}
        answer = await fleet.post("/pause", headers=headers | basic(OPERATOR))
        assert answer.status_code == 403
        assert "must pass the header 'Host' on unchanged" in answer.json()["error"]["message"]
        assert (await fleet.post("/pause", headers=headers | bearer(OPERATOR))).status_code == 200
        assert (await fleet.post("/pause", headers=headers | bearer("other"))).status_code == 401
    async with client(FakeController()) as fleet:
        assert (await fleet.post("/pause", headers=headers | bearer("any"))).status_code == 403


# -- the file --------------------------------------------------------------------------------------


def request(token: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in bearer(token).items()]
    return Request({"type": "http", "method": "POST", "path": "/pause", "headers": raw, "query_string": b""})


def allowed(guard: Guard, token: str) -> bool:
    try:
        guard.check(request(token), Access.OPERATOR)
    except (Unauthorized, Forbidden):
        return False
    return True


def test_changed_token_file_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "FILE_PERIOD_S", 0.0)
    file, new = tmp_path / "token", "new-operator-0123456789"
    file.write_text(OPERATOR)
    guard = Guard(Tokens(operator=TokenSource(tokens=(OPERATOR,), file=file)))
    assert allowed(guard, OPERATOR) and not allowed(guard, new)
    file.write_text(f"{OPERATOR}\n{new}\n")
    assert allowed(guard, OPERATOR) and allowed(guard, new)
    file.write_text(f"{new}\n")
    assert not allowed(guard, OPERATOR) and allowed(guard, new)


@pytest.mark.parametrize("damage", ["", "short", None])
def test_damaged_token_file_keeps_the_previous_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    monkeypatch.setattr(auth, "FILE_PERIOD_S", 0.0)
    file = tmp_path / "token"
    file.write_text(OPERATOR)
    guard = Guard(Tokens(operator=TokenSource(tokens=(OPERATOR,), file=file)))
    if damage is None:
        os.unlink(file)
    else:
        file.write_text(damage)
    assert allowed(guard, OPERATOR) and not allowed(guard, "short") and not allowed(guard, "")


# -- never shown -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_no_answer_and_no_log_shows_a_token(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[httpx.Response] = []
    serve_logger().addHandler(caplog.handler)
    try:
        async with client(FakeController(), token=OPERATOR, user_token=USER) as fleet:
            fleet_routes = [*USERS_ROUTES, ("POST", "/pause"), ("POST", "/train/step"), *UNKNOWN_ROUTES]
            for method, path in fleet_routes:
                for carried in (bearer(USER), basic(OPERATOR), bearer(f"{OPERATOR}x")):
                    answers.append(await fleet.request(method, path, headers=carried))
    finally:
        serve_logger().removeHandler(caplog.handler)
    shown = caplog.text + "".join(answer.text + str(answer.headers) for answer in answers)
    secrets = [OPERATOR, USER, basic(OPERATOR)["authorization"].removeprefix("Basic ")]
    assert not [secret for secret in secrets if secret in shown]


def test_tokens_travel_to_the_router_and_are_not_displayed() -> None:
    made = tokens(OPERATOR, USER)
    assert OPERATOR not in repr(made) and USER not in repr(made)
    assert pickle.loads(pickle.dumps(made)) == made


# -- in the address, by clients that have nothing else ----------------------------------------------

# With what a URL has to escape.
ESCAPED, QUOTED = "operator/0123:456789@%41?#", "operator%2F0123%3A456789%40%2541%3F%23"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with on_a_socket(application(FakeController(), token=ESCAPED, user_token=USER)) as address:
        yield address


def with_requests(url: str) -> int:
    with requests.Session() as session:  # as TRL has one
        return session.get(url, timeout=20).status_code


def with_aiohttp(url: str) -> int:
    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status

    return asyncio.run(ask())  # as SkyRL


@pytest.mark.slow
@pytest.mark.parametrize("ask", [with_requests, with_aiohttp])
def test_routes_take_the_token_of_the_address(address: str, ask: Callable[[str], int]) -> None:
    assert ask(f"http://x:{QUOTED}@{address}/fleet") == 200
    assert ask(f"http://x:{USER}@{address}/fleet") == 403
    assert ask(f"http://x:{USER}@{address}/v1/models") == 200
    assert ask(f"http://{address}/fleet") == 401


@pytest.mark.slow
def test_vllms_own_client_drives_a_fleet_with_it(address: str) -> None:
    HTTPVLLMWeightSyncClient(f"http://x:{QUOTED}@{address}").start_weight_update()
    with pytest.raises(requests.HTTPError, match="401"):
        HTTPVLLMWeightSyncClient(f"http://{address}").finish_weight_update()
