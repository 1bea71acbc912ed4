"""vLLM's adapter routes: bodies, answers and status codes are its own."""

from typing import Any

import httpx
import pytest

from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client

LOAD, UNLOAD, ALIAS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"


def load(path: str = "/adapters/a", name: str = "math", **more: Any) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": path, **more}


async def versions(fleet: httpx.AsyncClient) -> list[str]:
    found = (await fleet.get("/fleet/adapters")).json()["adapters"]
    return [f"{each['name']}@{each['version']}" for each in found]


async def test_a_load_answers_what_vllm_answers(fleet: httpx.AsyncClient) -> None:
    answer = await fleet.post(LOAD, json=load())
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'math' added successfully.")
    assert answer.headers["x-adapter"] == "math@1"
    assert await versions(fleet) == ["math@1"]


async def test_loading_in_place_makes_another_version(fleet: httpx.AsyncClient) -> None:
    await fleet.post(LOAD, json=load())
    again = await fleet.post(LOAD, json=load())
    assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    answer = await fleet.post(LOAD, json=load("/adapters/b", load_inplace=True))
    assert answer.status_code == 200
    assert await versions(fleet) == ["math@1", "math@2"]


async def test_prime_rls_route_loads_in_place(fleet: httpx.AsyncClient) -> None:
    for number in (1, 2):
        answer = await fleet.post(ALIAS, json=load())
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert answer.status_code == 200 and len(await versions(fleet)) == number


async def test_an_unload_answers_what_vllm_answers(fleet: httpx.AsyncClient) -> None:
    await fleet.post(LOAD, json=load())
    answer = await fleet.post(UNLOAD, json={"lora_name": "math", "lora_int_id": 7})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'math' removed successfully.")
    again = await fleet.post(UNLOAD, json={"lora_name": "math"})
    assert again.status_code == 404
    assert again.json()["error"]["message"] == "The lora adapter 'math' cannot be found."


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        (LOAD, load("/adapters/none"), 404),
        (LOAD, load(name=""), 400),
        (LOAD, load(name="base"), 400),
        (LOAD, load(name="a\nb"), 400),
        (LOAD, load(name="busy"), 409),
        (LOAD, {"lora_name": "math"}, 400),
        (LOAD, load(load_inplace="yes please"), 400),
        (UNLOAD, {}, 400),
    ],
)
async def test_what_is_wrong_is_the_callers_error(
    fleet: httpx.AsyncClient, controller: FakeController, route: str, body: dict[str, Any], status: int
) -> None:
    controller.loading.add("busy")
    answer = await fleet.post(route, json=body)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert await versions(fleet) == []


async def test_they_are_the_operators() -> None:
    async with client(FakeController(), token="o" * 32, user_token="u" * 32) as fleet:
        for method, path in (("POST", LOAD), ("POST", UNLOAD), ("POST", ALIAS), ("GET", "/fleet/adapters")):
            for token, status in ((None, 401), ("u" * 32, 403)):
                headers = {} if token is None else {"authorization": f"Bearer {token}"}
                answer = await fleet.request(method, path, json=load(), headers=headers)
                assert answer.status_code == status


async def test_a_load_that_was_decided_before_the_controller_died_is_a_success(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.dies_after = {"load_adapter"}
    answer = await fleet.post(LOAD, json=load())
    assert (answer.status_code, answer.headers["x-adapter"]) == (200, "math@1")
    controller.dies_after = {"load_adapter"}
    assert (await fleet.post(ALIAS, json=load())).status_code == 200
    assert await versions(fleet) == ["math@1", "math@2"]


async def test_a_load_of_somebody_else_is_not_the_one_that_was_lost(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.dies_before = {"load_adapter"}
    lost = await fleet.post(LOAD, json=load())
    assert (await fleet.post(LOAD, json=load("/adapters/b"))).headers["x-adapter"] == "math@1"
    assert lost.status_code == 503 and "x-adapter" not in lost.headers


async def test_a_load_that_was_lost_with_the_controller_can_be_sent_again(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.dies_before = {"load_adapter"}
    answer = await fleet.post(LOAD, json=load())
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert (await fleet.post(LOAD, json=load())).status_code == 200
