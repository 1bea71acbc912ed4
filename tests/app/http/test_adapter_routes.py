"""vLLM's adapter routes over the real controller: bodies, responses and status codes are vLLM's."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.app.http.serving import client
from tests.deployments.controller_in_process import ControllerInProcess
from tests.tiny_adapters import save_tiny_adapter

LOAD, UNLOAD, ALIAS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerInProcess]:
    controller = ControllerInProcess(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
async def fleet(controller: ControllerInProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with client(controller) as made:
        yield made


@pytest.fixture
def math(tmp_path: Path) -> dict[str, Any]:
    """The body of a load."""
    return {"lora_name": "math", "lora_path": str(save_tiny_adapter(tmp_path / "adapter", 1))}


async def versions(fleet: httpx.AsyncClient) -> list[str]:
    found = (await fleet.get("/fleet/adapters")).json()["adapters"]
    return [f"{each['name']}@{each['version']}" for each in found if each["state"] == "live"]


async def test_load_in_place_makes_another_version(fleet: httpx.AsyncClient, math: dict[str, Any]) -> None:
    answer = await fleet.post(LOAD, json=math)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'math' added successfully.")
    assert answer.headers["x-adapter"] == "math@1"
    again = await fleet.post(LOAD, json=math)
    assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    assert (await fleet.post(LOAD, json={**math, "load_inplace": True})).status_code == 200
    assert await versions(fleet) == ["math@1", "math@2"]


async def test_prime_rls_route_loads_in_place(fleet: httpx.AsyncClient, math: dict[str, Any]) -> None:
    for number in (1, 2):
        answer = await fleet.post(ALIAS, json=math)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert len(await versions(fleet)) == number


async def test_unloaded_adapter_is_not_found(fleet: httpx.AsyncClient, math: dict[str, Any]) -> None:
    await fleet.post(LOAD, json=math)
    answer = await fleet.post(UNLOAD, json={"lora_name": "math", "lora_int_id": 7})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'math' removed successfully.")
    again = await fleet.post(UNLOAD, json={"lora_name": "math"})
    assert again.status_code == 404
    assert again.json()["error"]["message"] == "The lora adapter 'math' cannot be found."


@pytest.mark.parametrize(
    ("route", "change"),
    [
        (LOAD, {"lora_name": ""}),
        (LOAD, {"lora_name": "a\nb"}),
        (LOAD, {"lora_path": None}),
        (LOAD, {"load_inplace": "yes please"}),
        (UNLOAD, {"lora_name": None}),
    ],
)
async def test_wrong_body_is_refused(
    fleet: httpx.AsyncClient, math: dict[str, Any], route: str, change: dict[str, Any]
) -> None:
    body = {name: value for name, value in (math | change).items() if value is not None}
    answer = await fleet.post(route, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert await versions(fleet) == []


@pytest.mark.parametrize("route", [LOAD, ALIAS])
@pytest.mark.parametrize("dies", ["before", "after"])
async def test_load_outlives_the_controller(
    fleet: httpx.AsyncClient,
    controller: ControllerInProcess,
    math: dict[str, Any],
    route: str,
    dies: Literal["before", "after"],
) -> None:
    controller.dies_in = {"load_adapter": dies}
    answer = await fleet.post(route, json=math)
    assert answer.status_code == 200 and answer.headers.get("x-adapter", "math@1") == "math@1"
    assert await versions(fleet) == ["math@1"]
