import asyncio
from typing import Any

import pytest
import schemathesis
from schemathesis.core.result import Ok
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.launchers.app import build_app

from app.http.openapi import fetch, merged, own_document
from app.http.route import GuardedRoute
from deployments.protocol.passed_routes import PASSED
from deployments.replica.server_arguments import EngineSpec, server_arguments
from deployments.replica.server_info import add_server_info
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import FakeRouter, NoReplica, application, client

pytestmark = pytest.mark.slow  # the whole document

STATUS = {
    "title": "vLLM's own",
    "anyOf": [{"$ref": "#/components/schemas/Part"}, {"$ref": "#/components/schemas/Status"}],
}
VLLM: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "FastAPI", "version": "0.1.0"},
    "paths": {
        "/v1/completions": {
            "post": {
                "summary": "Completions",
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Status"}}}
                },
            },
            "get": {"summary": "not passed"},
        },
        "/health": {"get": {"summary": "vLLM's own"}, "head": {"summary": "vLLM's own"}},
        "/collective_rpc": {"post": {"summary": "Collective Rpc"}},
    },
    "components": {"schemas": {"Status": STATUS, "Part": {"type": "string"}}},
}


SPEC = EngineSpec(model="m", served_model_name="m", backend="shm", staging="host")


async def document(router: Any, token: str | None = None) -> dict[str, Any]:
    async with client(FakeController(), router=router, token=token) as fleet:
        answer = await fleet.get("/openapi.json")
    assert answer.status_code == 200
    made: dict[str, Any] = answer.json()
    return made


class SlowRouter(FakeRouter):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(10)


async def test_our_routes_are_added_to_vllms() -> None:
    made = await document(FakeRouter(lambda path: VLLM))
    assert made["info"]["title"] == "Slipstream" and "description" not in made["info"]
    passed = VLLM["paths"]["/v1/completions"]["post"]
    assert made["paths"]["/v1/completions"] == {"post": passed}, "its GET does not pass"
    assert made["paths"]["/health"]["get"]["summary"] == "200 as soon as one replica serves; 503 before."
    assert "head" not in made["paths"]["/health"] and "/collective_rpc" not in made["paths"], (
        "they do not pass"
    )
    schemas = made["components"]["schemas"]
    assert schemas["Status"] == STATUS
    assert schemas["Part"] == {"type": "string"}
    assert schemas["SlipstreamStatus"]["required"] == ["status"]


@pytest.mark.parametrize("router", [NoReplica(), FakeRouter(lambda path: [1])])
async def test_without_a_replicas_document_ours_stands_alone(router: ASGIApp) -> None:
    made = await document(router)
    assert made["info"]["title"] == "Slipstream" and "No replica" in made["info"]["description"]
    assert "/fleet" in made["paths"] and "/v1/completions" not in made["paths"]


def test_document_of_vllms_own_server_is_merged_whole() -> None:
    server = build_app(server_arguments(SPEC), ("generate",))
    add_server_info(server, None)  # type: ignore[arg-type]
    theirs = server.openapi()
    app = application(FakeController())
    made = merged(theirs, own_document(app, lambda access: True), lambda access: True)
    ours = {route.path for route in app.routes if isinstance(route, GuardedRoute)}
    for path in ("/v1/chat/completions", "/inference/v1/generate", "/server_info", "/tokenize"):
        assert path in made["paths"] and path not in ours
    assert made["paths"].keys() - ours <= PASSED.keys()
    assert "slipstream" in made["paths"]["/health"]["get"]["tags"], "ours wins"
    for operations in made["paths"].values():
        assert all(operation["responses"] for operation in operations.values())
    names = {reference.removeprefix("#/components/schemas/") for reference in references(made)}
    assert names == names & made["components"]["schemas"].keys() and "GenerateRequest" in names
    operations = [
        operation["operationId"]
        for each in made["paths"].values()
        for operation in each.values()
        if "operationId" in operation
    ]
    assert len(operations) == len(set(operations))
    for found in schemathesis.openapi.from_dict(made).get_all_operations():
        assert isinstance(found, Ok), found.err()


async def test_replica_that_is_slow_is_not_waited_for() -> None:
    assert await fetch(SlowRouter(), timeout_s=0.01) is None


async def test_every_route_has_a_summary_and_its_schemas_and_every_reference_resolves() -> None:
    made = await document(NoReplica(), token="secret")
    for path, operations in made["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert operation["responses"].keys() == {"200", "default"}
    for reference in references(made):
        assert reference.removeprefix("#/components/schemas/") in made["components"]["schemas"]
    assert made["paths"]["/pause"]["post"]["security"] and "security" not in made["paths"]["/health"]["get"]


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in references(each)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [found for each in value.values() for found in references(each)]
