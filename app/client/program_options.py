"""Command-line options as a dataclass whose fields typer reads.

A field `steps: Annotated[int, typer.Option(min=1, help="...")] = 20` is the option `--steps`; the docstring
of the class is the program's help.
"""

import difflib
import inspect
import io
import json
import sys
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")
LOCAL_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(envvar="SLIPSTREAM_URL", help="the fleet's address")]


def print_any_text() -> None:
    """A model's answer may have characters that the output's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def parse(kind: type[T], arguments: Sequence[str] | None = None, name: str | None = None) -> T:
    """`arguments` None: of this process. `@ FILE` reads options from a TOML file; the command line wins.
    Raises SystemExit (a wrong option: 2, `--help`: 0) or ValueError (a wrong file)."""
    parsed: list[T] = []
    from_files, given = _with_files(kind, sys.argv[1:] if arguments is None else arguments)

    def program(**values: Any) -> None:
        parsed.append(kind(**values))

    program.__doc__ = kind.__doc__
    program.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]  # read by typer
    # Plain text: jobs print into logs.
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    application.command()(program)
    try:
        application(given, prog_name=name, default_map=from_files)
    except SystemExit:  # typer exits after every command
        if not parsed:
            raise
    return parsed[0]


def _with_files(kind: type[Any], arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "@":
            values |= read_file(kind, next(words, ""))
        else:
            rest.append(word)
    return values, rest


def read_file(kind: type[Any], path: str) -> dict[str, Any]:
    """As text; a table becomes JSON. Raises ValueError."""
    try:
        with open(path, "rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ValueError(f"@ {path}: expected a TOML file that can be read ({error.strerror})") from error
    except ValueError as error:  # wrong TOML or UTF-8
        raise ValueError(f"{path}: expected TOML: {error}") from error
    types = {name: str(hint) for name, hint in inspect.get_annotations(kind).items()}
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            raise ValueError(
                f"{path}: unknown option {key!r}{f' (did you mean {near[0]!r}?)' if near else ''}"
            )
        several = value if isinstance(value, list) else [value]
        texts = [json.dumps(each, default=str) if isinstance(each, dict) else str(each) for each in several]
        if not texts and "list[str]" in types[name]:
            texts = [""]  # typer takes an empty list for an option that is not given
        values[name] = texts if "list[" in types[name] else " ".join(texts)
    return values


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: expected JSON, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option}: expected a JSON object, got {text!r}")
    return value
