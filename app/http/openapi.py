"""`/openapi.json`: our own routes, and those of vLLM's that pass through, as a replica describes them.

Ours is written from the endpoints: summaries from docstrings, schemas from the handlers' annotations. Where
both have a route, it is ours. While no replica answers, the last description that one gave counts.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.types import ASGIApp

from app.http.answers import ErrorBody
from app.http.auth import Access, passed_access
from app.http.endpoint import Endpoint
from deployments.errors import SlipstreamError
from deployments.passed_routes import PASSED

FETCH_TIMEOUT_S = 2.0
_NO_REPLICA = "No replica has described vLLM's routes yet: these are the fleet's own."
_SCHEMAS = "#/components/schemas/"
_PREFIX = "Slipstream"  # vLLM's document has schemas of the same names
_SECURITY: list[dict[str, list[str]]] = [{"slipstream_token": []}, {"slipstream_password": []}]

Document = dict[str, Any]
Part = tuple[str, str, str]  # method, path, and one of query, body, answer, error
ERROR: Part = ("", "", "error")  # the same everywhere


class Description:
    """The document of one router.

    Args:
        router: answers for a replica.
        asks: whether a route needs a token.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        router: ASGIApp,
        asks: Callable[[Access], bool],
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        self._endpoints, self._router, self._asks = endpoints, router, asks
        self._timeout_s = timeout_s
        self._ours: Document | None = None  # it does not change
        self._theirs: Document | None = None  # as a replica described it last

    async def document(self) -> Document:
        """All routes that this router answers, as far as it knows."""
        if self._ours is None:
            self._ours = own_document(self._endpoints, self._asks)
        if (fetched := await fetch(self._router, self._timeout_s)) is not None:
            self._theirs = fetched
        if self._theirs is None:
            return {**self._ours, "info": {**self._ours["info"], "description": _NO_REPLICA}}
        return merged(self._theirs, self._ours, self._asks)


def own_document(endpoints: Sequence[Endpoint], asks: Callable[[Access], bool]) -> Document:
    """The OpenAPI document of our own routes.

    Args:
        asks: whether a route needs a token.
    """
    schemas, definitions = _schemas(endpoints)
    paths: Document = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas, definitions)
        if asks(endpoint.access):
            operation["security"] = _SECURITY
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {f"{_PREFIX}{name}": schema for name, schema in definitions.items()},
            "securitySchemes": {
                "slipstream_token": {"type": "http", "scheme": "bearer"},
                "slipstream_password": {"type": "http", "scheme": "basic"},
            },
        },
    }


def merged(theirs: Document, ours: Document, asks: Callable[[Access], bool]) -> Document:
    """Ours, with those of vLLM's routes that pass and the schemas that they use; what both have is ours."""
    paths: Document = {
        path: {
            method: _passed(path, operation, asks)
            for method, operation in operations.items()
            if method.upper() in PASSED[path]
        }
        for path, operations in theirs.get("paths", {}).items()
        if path in PASSED
    }
    for path, operations in ours["paths"].items():
        paths[path] = {**paths.get(path, {}), **operations}
    schemas = theirs.get("components", {}).get("schemas", {})
    used = {name: schemas[name] for name in _used(paths, schemas)}
    components = {**ours["components"], "schemas": {**used, **ours["components"]["schemas"]}}
    return {**ours, "paths": paths, "components": components}


def _used(paths: Document, schemas: Mapping[str, Any]) -> Sequence[str]:
    """The names of the schemas that paths refer to, and these to others; in the order of `schemas`."""
    found: set[str] = set()
    left = list(_references(paths))
    while left:
        name = left.pop()
        if name in schemas and name not in found:
            found.add(name)
            left.extend(_references(schemas[name]))
    return [name for name in schemas if name in found]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _references(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each.removeprefix(_SCHEMAS)
            elif key == "mapping" and isinstance(each, dict):  # of a discriminator: names alone
                yield from (str(name).removeprefix(_SCHEMAS) for name in each.values())
            else:
                yield from _references(each)


def _passed(path: str, operation: Document, asks: Callable[[Access], bool]) -> Document:
    return {**operation, "security": _SECURITY} if asks(passed_access(path)) else operation


async def fetch(router: ASGIApp, timeout_s: float = FETCH_TIMEOUT_S) -> Document | None:
    """The document of a replica's vLLM server; None if no replica answers with one in time."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://fleet")
    try:
        async with asyncio.timeout(timeout_s), client:
            answer = await client.get("/openapi.json")
        document = answer.json() if answer.is_success else None
    except (SlipstreamError, TimeoutError, ValueError):  # no replica, a busy router, or not JSON
        return None
    return document if isinstance(document, dict) else None


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[Part, Any], Document]:
    """The schema of each part of each endpoint, and the definitions to which they refer."""
    types: dict[Part, Any] = {ERROR: ErrorBody}
    for each in endpoints:
        contract = each.contract
        for name, kind in (("query", contract.query), ("body", contract.body), ("answer", contract.answer)):
            if _has_schema(kind):
                types[each.method, each.path, name] = kind
    inputs = [(part, _mode(part), TypeAdapter(kind)) for part, kind in types.items()]
    made, document = TypeAdapter.json_schemas(inputs, ref_template=f"{_SCHEMAS}{_PREFIX}{{model}}")
    return {part: schema for (part, _), schema in made.items()}, document.get("$defs", {})


def _mode(part: Part) -> Literal["validation", "serialization"]:
    return "validation" if part[2] in ("query", "body") else "serialization"


def _has_schema(kind: Any) -> bool:
    return kind is not None and not (inspect.isclass(kind) and issubclass(kind, Response | type(None)))


def _operation(endpoint: Endpoint, schemas: Mapping[Part, Any], definitions: Mapping[str, Any]) -> Document:
    key = (endpoint.method, endpoint.path)
    summary, _, rest = (
        inspect.cleandoc(endpoint.handler.__doc__ or "").partition("Raises:")[0].partition("\n\n")
    )
    operation: Document = {"tags": ["slipstream"], "summary": " ".join(summary.split())}
    if rest.strip():
        operation["description"] = rest.strip()
    if (query := schemas.get((*key, "query"))) is not None:
        operation["parameters"] = _parameters(definitions[query["$ref"].removeprefix(_SCHEMAS + _PREFIX)])
    if (body := schemas.get((*key, "body"))) is not None:
        model = definitions[body["$ref"].removeprefix(_SCHEMAS + _PREFIX)]
        operation["requestBody"] = {**_content(body), "required": bool(model.get("required"))}
        if (binary := endpoint.contract.binary) is not None:
            schema = {"type": "string", "format": "binary"}
            operation["requestBody"]["content"][binary] = {"schema": schema}
    succeeded: Document = {"description": "success"}
    if (answer := schemas.get((*key, "answer"))) is not None:
        succeeded |= _content(answer)
    elif endpoint.contract.answer is not type(None):
        succeeded["content"] = {endpoint.media_type: {"schema": {"type": "string"}}}
    failed = {"description": "what was expected and what was given", **_content(schemas[ERROR])}
    operation["responses"] = {"200": succeeded, "default": failed}
    return operation


def _parameters(model: Mapping[str, Any]) -> list[Document]:
    parameters = []
    for name, schema in model["properties"].items():
        rest = {key: value for key, value in schema.items() if key not in ("title", "description")}
        parameter = {
            "name": name,
            "in": "query",
            "required": name in model.get("required", ()),
            "schema": rest,
        }
        if "description" in schema:
            parameter["description"] = schema["description"]
        parameters.append(parameter)
    return parameters


def _content(schema: Any) -> Document:
    return {"content": {"application/json": {"schema": schema}}}
