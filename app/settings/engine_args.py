"""Checks of the free-form engine arguments (`engine.extra`) against those of the installed vLLM."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from app.settings.errors import ConfigError


def check_engine_args(extra: Mapping[str, Any]) -> None:
    """Check the names against vLLM's AsyncEngineArgs. Imports vLLM, unless there are no names.

    Raises:
        ConfigError: unknown names, each with a suggestion.
    """
    if not extra:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_names(extra, [field.name for field in dataclasses.fields(AsyncEngineArgs)])


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
