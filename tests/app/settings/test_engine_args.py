import subprocess
import sys

import pytest

from app.settings.engine_args import check_names
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
