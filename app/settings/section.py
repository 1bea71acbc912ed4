"""Base class of all sections, and pydantic's errors as sentences."""

import difflib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class Section(BaseModel):
    """A frozen group of settings without unknown names. Attribute docstrings are the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    SEPARATE = "separate"  # the trainer has its own devices
    COLOCATED = "colocated"  # one trainer rank on every GPU of the replicas


class ConfigError(ValueError):
    """One line per wrong setting."""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    return "\n".join(_sentence(detail, model) for detail in error.errors(include_url=False))


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def expected(setting: str, wanted: str, got: object, reason: str = "") -> str:
    return f"'{setting}': expected {wanted}, got {got}" + (f" ({reason})" if reason else "")


def _sentence(detail: ErrorDetails, model: type[BaseModel]) -> str:
    # A marker follows a mapping's wrong key.
    loc = detail["loc"][:-2] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
    path = ".".join(str(part) for part in loc)
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown setting '{path}'{_suggestion(detail['loc'], model)}"
        case "missing":
            return f"missing setting '{path}': expected a value, got none"
        case "value_error" | "assertion_error":
            return _with_section(path, str(detail.get("ctx", {}).get("error", detail["msg"])))
        case "model_type" | "model_attributes_type" | "dict_type":
            keys = ", ".join(_section(detail["loc"], model))
            wanted = f"a section with its own settings ({keys})" if keys else "a mapping"
            return expected(path or "args", wanted, _shown(detail["input"]))
    wanted = detail["msg"].removeprefix("Input should be ").split(", unable to ")[0]
    wanted = wanted.replace("String should have", "a string with").replace("a valid tuple", "a list")
    return expected(path, wanted, _shown(detail["input"]))


def _with_section(path: str, message: str) -> str:
    """Add the section's path to the setting that its rule names."""
    if not path:
        return message
    return "\n".join(line.replace("'", f"'{path}.", 1) for line in message.splitlines())


def _shown(value: Any) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggestion(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    name, section = str(loc[-1]), _section(loc[:-1], model)
    if close := difflib.get_close_matches(name, section, n=1):
        return f" (did you mean '{close[0]}'?)"
    if elsewhere := [path for path in _paths(model) if path.rsplit(".", 1)[-1] == name]:
        return " (did you mean " + " or ".join(f"'{path}'" for path in elsewhere) + "?)"
    return f" (expected one of {', '.join(section)})" if section else ""


def _section(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in loc:
        field = current.model_fields.get(str(part)) if current is not None else None
        current = section_in(field.annotation) if field is not None else None
    return list(current.model_fields) if current is not None else []


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = section_in(field.annotation)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def section_in(annotation: Any) -> type[BaseModel] | None:
    """In `Section` or `Section | None`."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
