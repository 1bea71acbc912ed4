"""Checks of the free-form engine arguments (`engine.extra`) against those of the installed vLLM."""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from app.settings.errors import ConfigError

# Of `vllm serve`, not of the engine: how a replica's server reads tool calls out of what the model said.
TOOL_ARGUMENTS = (
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "tool_call_parser",
    "tool_strict_level",
)


def check_engine_args(extra: Mapping[str, Any]) -> None:
    """Check the names against vLLM's AsyncEngineArgs. Imports vLLM, unless there are no names.

    Raises:
        ConfigError: unknown names, each with a suggestion, or tool calls that no replica could read.
    """
    if not extra:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_names(extra, [*(field.name for field in dataclasses.fields(AsyncEngineArgs)), *TOOL_ARGUMENTS])
    if extra.keys() & set(TOOL_ARGUMENTS):
        from vllm.tool_parsers import ToolParserManager

        check_tools(extra, ToolParserManager.list_registered())


def check_names(extra: Mapping[str, Any], known: list[str]) -> None:
    """Check the names against a list of known ones.

    Raises:
        ConfigError: unknown names, each with a suggestion.
    """
    complaints = []
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = (
                f"did you mean '{close[0]}'?" if close else "expected an argument of vLLM's AsyncEngineArgs"
            )
            complaints.append(f"unknown setting 'engine.extra.{name}' ({hint})")
    if complaints:
        raise ConfigError("\n".join(complaints))


def check_tools(extra: Mapping[str, Any], parsers: Collection[str]) -> None:
    """Check that tool calls can be read: a replica would not start, or would ignore the parser.

    Args:
        parsers: names of vLLM's parsers of tool calls.

    Raises:
        ConfigError: one of the two arguments without the other, or an unknown parser.
    """
    complaints = list(_broken_tools(extra, parsers))
    if complaints:
        raise ConfigError("\n".join(complaints))


def _broken_tools(extra: Mapping[str, Any], parsers: Collection[str]) -> Iterator[str]:
    parser, auto = extra.get("tool_call_parser"), extra.get("enable_auto_tool_choice", False)
    if not isinstance(auto, bool):
        yield f"'engine.extra.enable_auto_tool_choice': expected true or false, got {auto!r}"
    elif auto != (parser is not None):
        absent, given = (
            ("tool_call_parser", "enable_auto_tool_choice")
            if auto
            else ("enable_auto_tool_choice: true", "tool_call_parser")
        )
        yield f"'engine.extra.{given}': expected 'engine.extra.{absent}' beside it, got none"
    if parser is not None and parser not in parsers:
        close = difflib.get_close_matches(str(parser), parsers, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(sorted(parsers))}"
        yield f"'engine.extra.tool_call_parser': unknown parser {parser!r} ({hint})"
