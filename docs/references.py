"""The references of the site, made from what they describe: settings, routes, the command line.

`python -m docs.references configuration` prints one.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from app.settings.config import AppConfig
from app.settings.section import section_in

Schema = Mapping[str, Any]


def cell(text: str) -> str:
    """Text in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


# -- configuration ---------------------------------------------------------------------------------


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section below a model, with the path by which a configuration names it."""
    yield path, model
    for name, field in model.model_fields.items():
        if (inner := section_in(field.annotation)) is not None:
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def undescribed(model: type[BaseModel] = AppConfig) -> list[str]:
    """The settings without a description."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, section in sections(model)
        for name, field in section.model_fields.items()
        if not field.description
    ]


def configuration() -> str:
    schema = AppConfig.model_json_schema(mode="serialization")
    text = (
        "# Configuration\n\nSettings under `args` in a configuration file. An unknown or inconsistent "
        "setting is refused with a message that names it, what was expected and what was given.\n"
    )
    for path, section in sections(AppConfig):
        title = f"`{path}`" if path else "The application"
        about = inspect.cleandoc(section.__doc__ or "") if section.__doc__ else ""
        text += f"\n## {title}\n\n{about}\n\n" if about else f"\n## {title}\n\n"
        found = schema if section is AppConfig else schema["$defs"][section.__name__]
        text += table(
            ("setting", "type", "default", "meaning"), _settings(path, section, found, schema["$defs"])
        )
    return text


def _settings(
    path: str, section: type[BaseModel], found: Schema, schemas: Schema
) -> Iterator[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        full = f"{path}.{name}".lstrip(".")
        meaning = (field.description or "").replace("None: ", f"{_NULL}: ")
        if section_in(field.annotation) is not None:
            yield f"`{name}`", f"[section](#{full.replace('.', '')})", _default(field, shown=False), meaning
        else:
            kind = _kind(found["properties"][name], schemas)
            yield f"`{name}`", kind, _default(field, shown=True), meaning


def _default(field: Any, *, shown: bool) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return _NULL
    if not shown:
        return ""
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    value = value.value if isinstance(value, Enum) else to_jsonable_python(value)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


_LIMITS = {
    "exclusiveMinimum": "above {:,}",
    "minimum": "at least {:,}",
    "exclusiveMaximum": "below {:,}",
    "maximum": "at most {:,}",
}
_NULL = "`null`"
_NAMES = {
    "null": _NULL,
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "string": "text",
    "object": "mapping",
}


def _kind(schema: Schema, schemas: Schema) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return _kind(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each, schemas) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}"
    found = ((text, schema.get(name)) for name, text in _LIMITS.items())
    limits = [
        text.format(int(limit) if limit == int(limit) else limit)
        for text, limit in found
        if limit is not None
    ]
    return f"{_NAMES.get(kind, kind)} {' and '.join(limits)}".strip()


# -- HTTP ------------------------------------------------------------------------------------------


def http() -> str:
    from app.http.auth import passed_access
    from app.http.openapi import own_document
    from app.http.route import GuardedRoute
    from deployments.protocol.passed_routes import PASSED, REFUSED

    app = own_application()
    document = own_document(app, lambda access: True)
    schemas = document["components"]["schemas"]
    text = (
        "# HTTP\n\nA running fleet describes all routes at `/openapi.json`, vLLM's with their bodies. "
        "[Security](../operating/security.md#which-route-needs-what) says who may call what. Errors "
        'are `{"error": {"type", "message", "detail"}}`: '
        "[what clients get](../operating/runbook.md#what-clients-get).\n\n## The fleet's own\n"
    )
    for route in app.routes:
        if not isinstance(route, GuardedRoute) or not route.include_in_schema:
            continue
        method = route.allowed[0]
        operation = document["paths"][route.path][method.lower()]
        text += f"\n### {method} {route.path}\n\n"
        about = dict.fromkeys((operation.get("summary", ""), operation.get("description", "")))
        text += "".join(f"{each}\n\n" for each in about if each)
        text += f"Needs: {_ACCESS[route.access.name]}.\n\n"
        rows = {row[0]: row for row in (*_parameters(operation, schemas), *_body(operation, schemas))}
        if rows:
            text += table(("name", "in", "type", "default", "meaning"), iter(rows.values()))
    text += (
        "\n## vLLM's, forwarded to a replica\n\nTheir bodies are vLLM 0.32's. JSON answers gain "
        "`weight_version`, and `weight_versions` for each choice.\n\n"
    )
    passed = (
        (f"`{', '.join(sorted(methods))} {path}`", _ACCESS[passed_access(path).name])
        for path, methods in PASSED.items()
        if path not in document["paths"] and path != "/openapi.json"
    )
    text += table(("route", "needs"), passed)
    text += "\n## vLLM's that do not pass\n\n"
    return text + table(("route", "why"), ((f"`{path}`", why) for path, why in REFUSED.items()))


_ACCESS = {
    "OPEN": "nothing",
    "USER": "a user's token, where users have one",
    "OPERATOR": "the operator's token, where there is one",
}


def own_application() -> Any:
    """The router's application, which answers nothing here."""
    from app.http.auth import Guard
    from app.http.ingress import build_app
    from app.settings.security import Tokens

    absent: Any = None
    return build_app(Guard(Tokens()), absent, absent, scrape=absent)


def _parameters(operation: Schema, schemas: Schema) -> Iterator[tuple[str, ...]]:
    for each in operation.get("parameters", ()):
        schema = each["schema"]
        default = "required" if each.get("required") else _shown(schema.get("default"))
        about = each.get("description", schema.get("description", ""))
        yield f"`{each['name']}`", each["in"], _route_kind(schema, schemas), default, about


def _body(operation: Schema, schemas: Schema) -> Iterator[tuple[str, ...]]:
    in_query = {each["name"] for each in operation.get("parameters", ())}
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in schema.get("required", ()) else _shown(field.get("default"))
        where = "query or body" if name in in_query else "body"
        yield f"`{name}`", where, _route_kind(field, schemas), default, field.get("description", "")


def _route_kind(schema: Schema, schemas: Schema) -> str:
    if "$ref" in schema and schemas[schema["$ref"].rpartition("/")[2]].get("type") == "object":
        return "object"
    return _kind(schema, schemas)


def _shown(value: object) -> str:
    return f"`{json.dumps(value)}`"


# -- the command line ------------------------------------------------------------------------------


def command_line() -> str:
    import typer

    from app.command.cli import cli

    group: Any = typer.main.get_command(cli)
    text = f"# Command line\n\n{group.help}\n"
    for name, command in _commands(group, "slipstream"):
        if name == "slipstream rl":
            command = rl_command()
        text += f"\n## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n\n"
        rows = [
            _option(each)
            for each in command.params
            if each.name != "help" and not getattr(each, "hidden", False)
        ]
        if rows:
            text += table(("option", "default", "meaning"), iter(rows))
    return text


def rl_command() -> Any:
    """The RL job's own command line, on which `slipstream rl` passes its options."""
    import typer

    from app.jobs.options import JobOptions

    def program(**values: Any) -> None: ...

    program.__doc__ = JobOptions.__doc__
    program.__signature__ = inspect.signature(JobOptions)  # type: ignore[attr-defined]  # as `program_options`
    application = typer.Typer(add_completion=False)
    application.command()(program)
    return typer.main.get_command(application)


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield f"{prefix} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")


def _option(parameter: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{each}`" for each in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif isinstance(parameter.show_default, str):
        shown = parameter.show_default
    else:
        shown = "" if default is None or default is False or "UNSET" in str(default) else f"`{default}`"
    return names, shown, getattr(parameter, "help", None) or ""


# -- families of models ----------------------------------------------------------------------------

RESULTS = Path(__file__).with_name("reference") / "models.json"
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}
_COLUMNS = ("trained", "published", "stored")


def families() -> str:
    """What `tests.deployments.weights.staging.every_family` found, and how many passed."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    passed = {
        name: sum(
            all(each.get(device, {}).get(column) == "yes" for column in _COLUMNS) for each in results.values()
        )
        for device, name in _DEVICES.items()
    }
    counts = ", ".join(f"{count} on a {name}" for name, count in passed.items())
    head = ("family", "class", *_COLUMNS, "what failed")
    return f"Of {len(results)} families all three passed for {counts}.\n\n{table(head, _families(results))}"


def _families(results: Mapping[str, Schema]) -> Iterator[tuple[str, ...]]:
    for family, found in results.items():
        devices = {name: found[device] for device, name in _DEVICES.items() if device in found}
        did = (
            ", ".join(name for name, columns in devices.items() if columns.get(column) == "yes")
            for column in _COLUMNS
        )
        failed = (
            f"{name}, {column}: {why}"
            for name, columns in devices.items()
            for column, why in columns.items()
            if why != "yes"
        )
        yield f"`{family}`", f"`{found['class']}`", *did, "; ".join(failed)


PAGES = {
    "reference/configuration.md": configuration,
    "reference/http.md": http,
    "reference/command-line.md": command_line,
}

if __name__ == "__main__":
    printed = {page.rpartition("/")[2][:-3]: make for page, make in PAGES.items()}
    print((printed | {"models": families})[sys.argv[1]]())
