from dataclasses import fields
from typing import Any

import pytest

from app.settings.config import parse_config
from app.settings.engine import OWN_SETTINGS, EngineConfig, broken_tools, unknown_names
from tests.app.settings.complaints import COLOCATED


def test_numbers_are_accepted_as_values_of_the_engines_variables() -> None:
    config = parse_config({"model": "m", "engine": {"env": {"VLLM_BATCH_INVARIANT": 1}}})
    assert config.engine.env == {"VLLM_BATCH_INVARIANT": "1"}


def test_the_number_of_replicas_is_fixed_unless_there_is_room_for_more() -> None:
    fixed = parse_config({"model": "m"}).fleet_size
    assert (fixed.least, fixed.most, fixed.wanted, fixed.fixed) == (
        2,
        2,
        2,
        "'engine.max_replicas' is not set",
    )
    size = parse_config({"model": "m", "engine": {"max_replicas": 4}}).fleet_size
    assert (size.least, size.most, size.wanted, size.fixed) == (1, 4, 2, None)


def test_the_load_decides_with_auto() -> None:
    config = parse_config({"model": "m", "engine": {"num_replicas": "auto", "max_replicas": 4}})
    assert (config.engine.first_replicas, config.fleet_size.wanted) == (1, None)


def test_colocated_replicas_have_fixed_slots() -> None:
    reason = parse_config({"model": "m", **COLOCATED}).fleet_size.fixed
    assert reason is not None and reason.startswith("the slots")


def test_unknown_names_are_refused_each_with_a_suggestion() -> None:
    assert list(unknown_names({"blok-size": 16, "block_size": 1, "zzz": 1}, ["block_size"])) == [
        "unknown setting 'engine.extra.blok-size' (did you mean 'block_size'?)",
        "unknown setting 'engine.extra.zzz' (expected an argument of vLLM's AsyncEngineArgs)",
    ]


def test_settings_that_are_not_ours_are_vllms_arguments() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(EngineConfig.model_fields) - OWN_SETTINGS <= {each.name for each in fields(AsyncEngineArgs)}


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (
            {"enable_auto_tool_choice": True},
            "'engine.extra.enable_auto_tool_choice': "
            "expected 'engine.extra.tool_call_parser' beside it, got none",
        ),
        (
            {"tool_call_parser": "hermes"},
            "'engine.extra.tool_call_parser': "
            "expected 'engine.extra.enable_auto_tool_choice: true' beside it, got none",
        ),
        (
            {"enable_auto_tool_choice": True, "tool_call_parser": "hermess"},
            "'engine.extra.tool_call_parser': unknown parser 'hermess' (did you mean 'hermes'?)",
        ),
        (
            {"enable_auto_tool_choice": True, "tool_call_parser": 7},
            "'engine.extra.tool_call_parser': unknown parser 7 (expected one of hermes, mistral)",
        ),
        (
            {"enable_auto_tool_choice": "yes", "tool_call_parser": "hermes"},
            "'engine.extra.enable_auto_tool_choice': expected true or false, got 'yes'",
        ),
    ],
)
def test_tool_settings_without_a_parser_are_refused(extra: dict[str, Any], complaint: str) -> None:
    assert list(broken_tools(extra, ["mistral", "hermes"])) == [complaint]
