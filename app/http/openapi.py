"""`/openapi.json`: FastAPI's document of our routes, merged with a replica's of the forwarded ones. Ours wins
on conflict."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp

from app.http.auth import Access, passed_access
from app.http.route import GuardedRoute
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.passed_routes import PASSED

FETCH_TIMEOUT_S = 2.0
_NO_REPLICA = "No replica answers, which would describe vLLM's routes: these are the fleet's own."
_SCHEMAS = "#/components/schemas/"
_PREFIX = "Slipstream"  # vLLM has schemas of the same names
_SECURITY: list[dict[str, list[str]]] = [{"slipstream_token": []}, {"slipstream_password": []}]

Document = dict[str, Any]


async def description(app: FastAPI, router: ASGIApp, asks: Callable[[Access], bool]) -> Document:
    ours = own_document(app, asks)
    if (theirs := await fetch(router)) is None:
        return {**ours, "info": {**ours["info"], "description": _NO_REPLICA}}
    return merged(theirs, ours, asks)


def own_document(app: FastAPI, asks: Callable[[Access], bool]) -> Document:
    document: Document = json.loads(json.dumps(app.openapi()).replace(_SCHEMAS, _SCHEMAS + _PREFIX))
    for route in app.routes:
        if isinstance(route, GuardedRoute) and route.include_in_schema and asks(route.access):
            for operation in document["paths"][route.path].values():
                operation["security"] = _SECURITY
    schemas = document.get("components", {}).get("schemas", {})
    document["components"] = {
        "schemas": {_PREFIX + name: schema for name, schema in schemas.items()},
        "securitySchemes": {
            "slipstream_token": {"type": "http", "scheme": "bearer"},
            "slipstream_password": {"type": "http", "scheme": "basic"},
        },
    }
    return document


def merged(theirs: Document, ours: Document, asks: Callable[[Access], bool]) -> Document:
    paths: Document = {
        path: {
            method: operation | ({"security": _SECURITY} if asks(passed_access(path)) else {})
            for method, operation in operations.items()
            if method.upper() in PASSED[path]
        }
        for path, operations in theirs.get("paths", {}).items()
        if path in PASSED
    }
    for path, operations in ours["paths"].items():
        paths[path] = {**paths.get(path, {}), **operations}
    schemas = {**theirs.get("components", {}).get("schemas", {}), **ours["components"]["schemas"]}
    components = {**ours["components"], "schemas": schemas}
    return {**ours, "paths": paths, "components": components}


async def fetch(router: ASGIApp, timeout_s: float = FETCH_TIMEOUT_S) -> Document | None:
    """None if no replica responds in time."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://fleet")
    try:
        async with asyncio.timeout(timeout_s), client:
            answer = await client.get("/openapi.json")
        document = answer.json() if answer.is_success else None
    except (SlipstreamError, TimeoutError, ValueError):  # no replica, a busy router, or not JSON
        return None
    return document if isinstance(document, dict) else None
