import httpx
import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.mark.parametrize(
    "path", ["/", "/health", "/fleet", "/fleet/rounds", "/metrics", "/openapi.json", "/v1/x"]
)
async def test_reading_and_generating_need_no_token(path: str) -> None:
    async with client(FakeController(), token="secret") as fleet:
        assert (await fleet.get(path)).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}]
)
@pytest.mark.parametrize("path", ["/pause", "/fleet/rollback", "/train/step", "/update_weights"])
async def test_routes_that_change_something_need_the_token(path: str, headers: dict[str, str]) -> None:
    controller = FakeController()
    async with client(controller, token="secret") as fleet:
        answer = await fleet.post(path, content=b"{not even JSON", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "unauthorized"
    assert f"{path} needs the header 'Authorization: Bearer <token>'" in answer.json()["error"]["message"]
    assert controller.calls == []


@pytest.mark.parametrize(("token", "scheme"), [("secret", "Bearer"), ("secret", "bearer"), (None, "Bearer")])
async def test_the_token_opens_them_and_without_one_they_are_open(token: str | None, scheme: str) -> None:
    async with client(FakeController(), token=token) as fleet:
        answer: httpx.Response = await fleet.post("/pause", headers={"authorization": f"{scheme} secret"})
    assert answer.json() == {"status": "paused"}
