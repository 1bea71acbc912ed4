"""`/openapi.json`: vLLM's document with our routes added."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.http.openapi import fetch
from deployments.errors import FleetUnavailable
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import FakeRouter, client

VLLM: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "FastAPI", "version": "0.1.0"},
    "paths": {
        "/v1/completions": {"post": {"summary": "Completions"}},
        "/health": {"get": {"summary": "vLLM's own"}, "head": {"summary": "vLLM's own"}},
        "/collective_rpc": {"post": {"summary": "Collective Rpc"}},
    },
    "components": {"schemas": {"Message": {"title": "vLLM's own"}}},
}


async def document(router: Any, token: str | None = None) -> dict[str, Any]:
    async with client(FakeController(), router=router, token=token) as fleet:
        answer = await fleet.get("/openapi.json")
    assert answer.status_code == 200
    made: dict[str, Any] = answer.json()
    return made


class BrokenRouter(FakeRouter):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise FleetUnavailable("no replica is ready")


class SlowRouter(FakeRouter):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(10)


async def test_our_routes_are_added_to_vllms() -> None:
    made = await document(FakeRouter(lambda path: VLLM))
    assert made["info"] == VLLM["info"]
    assert made["paths"]["/v1/completions"] == VLLM["paths"]["/v1/completions"]
    assert made["paths"]["/health"]["get"]["summary"] == "200 as soon as one replica serves; 503 before."
    assert "head" not in made["paths"]["/health"] and "/collective_rpc" not in made["paths"], (
        "they do not pass"
    )
    schemas = made["components"]["schemas"]
    assert schemas["Message"] == {"title": "vLLM's own"}
    assert schemas["SlipstreamMessage"]["required"] == ["message"]


@pytest.mark.parametrize("router", [BrokenRouter(), FakeRouter(lambda path: [1])])
async def test_without_a_replicas_document_ours_stands_alone(router: FakeRouter) -> None:
    made = await document(router)
    assert made["info"]["title"] == "Slipstream"
    assert "/fleet" in made["paths"] and "/v1/completions" not in made["paths"]


async def test_a_replica_that_is_slow_is_not_waited_for() -> None:
    assert await fetch(SlowRouter(), timeout_s=0.01) is None


async def test_every_route_has_a_summary_and_its_schemas_and_every_reference_resolves() -> None:
    made = await document(BrokenRouter(), token="secret")
    for path, operations in made["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert operation["responses"].keys() == {"200", "default"}
    for reference in references(made):
        assert reference.removeprefix("#/components/schemas/") in made["components"]["schemas"]
    assert made["paths"]["/pause"]["post"]["security"] and "security" not in made["paths"]["/health"]["get"]


async def test_parameters_bodies_and_answers_are_those_of_the_models() -> None:
    made = await document(BrokenRouter())
    paths, schemas = made["paths"], made["components"]["schemas"]
    names = [(each["name"], each["required"]) for each in paths["/pause"]["post"]["parameters"]]
    assert names == [("mode", False), ("clear_cache", False)]
    assert schemas["SlipstreamInFlight"]["enum"] == ["keep", "wait", "abort"]
    rollback = paths["/fleet/rollback"]["post"]
    assert rollback["requestBody"]["required"] is True
    assert schemas["SlipstreamRollbackBody"]["additionalProperties"] is False
    answered = rollback["responses"]["200"]["content"]["application/json"]["schema"]
    assert answered == {"$ref": "#/components/schemas/SlipstreamRoundReport"}
    assert paths["/train/publish"]["post"]["requestBody"]["required"] is False
    slept = paths["/sleep"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert slept == {"$ref": "#/components/schemas/SlipstreamFellAsleep"}
    assert "text/event-stream" in paths["/fleet/events"]["get"]["responses"]["200"]["content"]
    trajectories = schemas["SlipstreamStepBody"]["properties"]["trajectories"]
    assert "advantage" in trajectories["items"]["required"]


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in references(each)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [found for each in value.values() for found in references(each)]
