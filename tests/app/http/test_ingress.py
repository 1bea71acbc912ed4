"""The routes together: what is ours, what is a replica's, and the shape of every error."""

import ast
import json
import re
from pathlib import Path

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from starlette.requests import Request

from app.http.ingress import answer_foreign_error
from deployments.protocol.errors import Conflict, FleetUnavailable
from deployments.protocol.passed_routes import FOREIGN, PASSED, REFUSED
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_vllm_route_is_forwarded(path: str) -> None:
    async with client(FakeController()) as fleet:
        assert (await fleet.post(path)).json() == {"replica": path}


@pytest.mark.parametrize("path", ["/no/such/route", "/pause/", "/collective_rpc", "/scale_elastic_ep"])
async def test_unlisted_route_is_not_found(path: str) -> None:
    async with client(FakeController()) as fleet:
        answer = await fleet.post(path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found")


async def test_route_of_ours_with_another_method_goes_nowhere() -> None:
    controller = FakeController()
    async with client(controller) as fleet:
        answer = await fleet.get("/pause")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/pause: expected POST, got 'GET'"
    assert controller.calls == []


async def test_page_is_ours() -> None:
    async with client(FakeController()) as fleet:
        answer = await fleet.get("/")
    assert answer.status_code == 200 and "<title>Slipstream</title>" in answer.text


def test_page_shows_every_kind_of_event() -> None:
    """A browser's EventSource drops events of a kind that nobody listens for."""
    recorded = {
        call.args[0].value
        for file in Path("deployments/ledger").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "record"
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert {"round", "adapter", "drain_expired"} <= recorded
    listened = re.search(r"const kinds = (\[.*?\]);", Path("app/http/page.html").read_text())
    assert listened is not None and recorded <= set(json.loads(listened[1]))


@pytest.mark.parametrize("detail", [{}, {"retry_after_s": 3.4}])
async def test_unavailable_fleet_sends_retry_after(detail: dict[str, float]) -> None:
    controller = FakeController()
    controller.fail_next["fleet"] = FleetUnavailable("no replica serves", detail)
    async with client(controller) as fleet:
        answer = await fleet.get("/fleet")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == str(round(detail.get("retry_after_s", 1)))
    assert answer.json()["error"] == {
        "type": "fleet_unavailable",
        "message": "no replica serves",
        "detail": detail,
    }


async def test_error_of_our_own_is_one_line() -> None:
    controller = FakeController()
    controller.fail_next["fleet"] = ValueError("first line\nsecond line")  # type: ignore[assignment]
    async with client(controller) as fleet:
        answer: httpx.Response = await fleet.get("/fleet")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "type": "internal_error",
        "message": "ValueError: first line",
        "detail": {},
    }


async def test_error_of_another_deployment_is_answered_as_its_cause() -> None:
    request = Request({"type": "http", "method": "GET", "path": "/fleet", "headers": [], "query_string": b""})
    cause = Conflict("a round is open", {"round_id": 3})
    answer = await answer_foreign_error(request, RayTaskError("fleet", "a traceback", cause))
    assert answer.status_code == 409 and b'"round_id":3' in answer.body


# -- routes of prime-rl's and SkyRL's servers --------------------------------------------------------


async def test_fleet_without_replicas_is_alive() -> None:
    controller = FakeController()
    controller.serving = ()
    async with client(controller, token="operator-0123456789") as fleet:
        assert (await fleet.get("/health")).status_code == 503
        answer = await fleet.get("/liveness")
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


async def test_fleet_without_a_controller_is_not_alive() -> None:
    controller = FakeController()
    controller.fail_next["fleet"] = ActorDiedError()
    async with client(controller) as fleet:
        assert (await fleet.get("/liveness")).status_code == 503


async def test_session_is_finished_with_a_users_token() -> None:
    controller = FakeController()
    async with client(controller, token="operator-0123456789", user_token="user-0123456789ab") as fleet:
        path = "/finish_session?session_id=trajectory-1"
        assert (await fleet.post(path)).status_code == 401
        answer = await fleet.post(path, headers={"authorization": "Bearer user-0123456789ab"})
        assert (answer.status_code, answer.json()) == (200, {"status": "finished"})
        nameless = await fleet.post("/finish_session", headers={"authorization": "Bearer user-0123456789ab"})
    assert nameless.status_code == 400
    assert "session_id" in nameless.json()["error"]["message"]
    assert controller.calls == []


@pytest.mark.parametrize("path", FOREIGN)
async def test_route_of_another_server_is_named_with_what_to_use(path: str) -> None:
    assert path not in PASSED.keys() | REFUSED.keys()
    async with client(FakeController()) as fleet:
        answer: httpx.Response = await fleet.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == "not_found"
    assert "is no route of this fleet: it is a route of" in error["message"]
