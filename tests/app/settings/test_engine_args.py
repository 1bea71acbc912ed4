import subprocess
import sys
from typing import Any

import pytest

from app.settings.engine_args import check_engine_args, check_names, check_tools
from app.settings.errors import ConfigError


def test_known_names_are_accepted() -> None:
    check_names({"block_size": 16}, ["block_size"])


def test_unknown_names_are_refused_each_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        check_names({"blok-size": 16, "zzz": 1}, ["block_size"])
    assert str(caught.value).splitlines() == [
        "unknown setting 'engine.extra.blok-size' (did you mean 'block_size'?)",
        "unknown setting 'engine.extra.zzz' (expected an argument of vLLM's AsyncEngineArgs)",
    ]


def test_no_names_are_checked_without_vllm() -> None:
    program = (
        "import sys\nfrom app.settings.engine_args import check_engine_args\n"
        "check_engine_args({})\nprint('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_tool_calls_are_arguments_of_the_server_and_accepted() -> None:
    check_engine_args({"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "block_size": 16})


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
def test_tool_calls_that_nobody_could_read_are_refused(extra: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tools(extra, ["mistral", "hermes"])
    assert str(caught.value) == complaint
