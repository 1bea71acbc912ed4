"""What prime-rl and SkyRL call on servers of their own, and what a fleet says of the rest."""

import httpx
import pytest
from ray.exceptions import ActorDiedError

from deployments.protocol.passed_routes import FOREIGN, PASSED, REFUSED
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


async def test_a_fleet_without_replicas_is_alive() -> None:
    controller = FakeController()
    controller.serving = ()
    async with client(controller, token="operator-0123456789") as fleet:
        assert (await fleet.get("/health")).status_code == 503
        answer = await fleet.get("/liveness")
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


async def test_a_fleet_whose_controller_is_gone_is_not() -> None:
    controller = FakeController()
    controller.fail_next["fleet"] = ActorDiedError()
    async with client(controller) as fleet:
        assert (await fleet.get("/liveness")).status_code == 503


async def test_a_session_is_finished_with_a_users_token() -> None:
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
async def test_a_route_of_another_server_is_named_with_what_to_use(path: str) -> None:
    assert path not in PASSED.keys() | REFUSED.keys()
    async with client(FakeController()) as fleet:
        answer: httpx.Response = await fleet.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["type"] == "not_found"
    assert "is no route of this fleet: it is a route of" in error["message"]
