"""The routes together: what is ours, what is a replica's, and the shape of every error."""

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from starlette.requests import Request

from app.http.ingress import answer_foreign_error
from deployments.protocol.errors import Conflict, FleetUnavailable
from deployments.protocol.passed_routes import FOREIGN, PASSED, REFUSED
from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_trainer import FakeTrainer
from tests.app.http.serving import MAX_BODY_BYTES, client


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


# -- what a caller is told of a wrong body ---------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b" \n", b"{}", b'{"label": null}'])
async def test_body_is_json_whatever_its_media_type_and_may_be_empty(content: bytes) -> None:
    trainer = FakeTrainer()
    async with client(FakeController(), trainer=trainer) as fleet:
        for media_type in ("application/json", "application/x-www-form-urlencoded", ""):
            headers = {"content-type": media_type} if media_type else {}
            answer = await fleet.post("/train/publish", content=content, headers=headers)
            assert (answer.status_code, trainer.received.pop()) == (200, None), media_type


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{x", "the body must be JSON: key must be a string"),
        (b"[" * 900, "the body must be JSON: recursion limit exceeded"),
        (b'{"label": "\\ud800"}', "the body must be JSON: unexpected end of hex escape"),
        (b"null", "the body: expected an object, got None"),
        (b"[1]", "the body: expected an object, got list"),
        (b'{"step": "7"}', "step: expected a valid integer, got '7'"),
        (b'{"lable": 1}', "expected no other fields than ['after', 'label', 'step'], got 'lable'"),
        (b'{"step": [], "lable": 1}', "step: expected a valid integer, got list; expected no other"),
        (b'{"step": "' + b"7" * 900 + b'"}', "step: expected a valid integer, got '" + "7" * 60 + "'"),
        (b'{"label": "' + b"x" * MAX_BODY_BYTES, "the body must have at most 1000 bytes"),
    ],
)
async def test_wrong_body_is_refused_with_what_was_expected_and_what_came(
    content: bytes, message: str
) -> None:
    async with client(FakeController(), trainer=FakeTrainer()) as fleet:
        answer = await fleet.post("/train/publish", content=content)
    assert answer.status_code == (413 if len(content) > MAX_BODY_BYTES else 400)
    assert answer.json()["error"]["message"].startswith(message)


async def test_payload_may_hold_any_json() -> None:
    controller = FakeController()
    async with client(controller) as fleet:
        await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
        await fleet.post("/start_weight_update")
        content = b'{"update_info": {"a": [1, null, {"b": NaN}], "c": "\xc3\xa9"}, "ignored": 1}'
        assert (await fleet.post("/update_weights", content=content)).status_code == 200
    assert repr(controller.sent) == "[{'a': [1, None, {'b': nan}], 'c': 'é'}]"


async def test_head_is_answered_where_get_is() -> None:
    async with client(FakeController()) as fleet:
        assert (await fleet.head("/health")).status_code == 200
        assert (await fleet.head("/get_world_size?include_dp=perhaps")).status_code == 400
        for path, allowed in (("/fleet/events", "GET"), ("/pause", "POST")):
            answer = await fleet.head(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert (await fleet.post("/health")).headers["allow"] == "GET, HEAD"
