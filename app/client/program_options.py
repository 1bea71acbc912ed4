"""Command-line options as a dataclass, whose fields typer reads.

A field `steps: Annotated[int, typer.Option(min=1, help="...")] = 20` is the option `--steps`; the class's
docstring describes the program.
"""

import inspect
import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")
LOCAL_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(envvar="SLIPSTREAM_URL", help="the fleet's address")]


def parse(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """Parse options; `arguments` None takes this process's. Raises SystemExit: an option is wrong or
    missing (2, with a usage message), or `--help` was given (0)."""
    parsed: list[T] = []

    def program(**values: Any) -> None:
        parsed.append(kind(**values))

    program.__doc__ = kind.__doc__
    program.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]  # where typer looks for options
    # Plain text: jobs print into logs.
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    application.command()(program)
    try:
        application(None if arguments is None else list(arguments))
    except SystemExit:  # typer exits after every command; here it only parses
        if not parsed:
            raise
    return parsed[0]


def json_object(text: str, option: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: expected JSON, got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option}: expected a JSON object, got {text!r}")
    return value
