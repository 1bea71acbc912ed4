"""Errors for code that is missing or wrong."""

import sys
from pathlib import Path

import pytest

from app.jobs.user_code import blamed, imported


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("json", r"^--reward must look like package.module:function, got 'json'$"),
        (
            "no_such:f",
            r"^--reward 'no_such:f' cannot be imported: it raised ModuleNotFoundError: No module .*'$",
        ),
        ("json:nothing", r"cannot be imported: it raised AttributeError: module 'json' has no attribute"),
        ("wrong_module:f", r"raised NameError: name 'undefined' is not defined \(wrong_module.py:2\)$"),
    ],
)
def test_a_failed_import_is_named(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_module.py").write_text("f = 1\nundefined\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        imported(path, "--reward")
    assert "wrong_module" not in sys.modules


def test_a_fault_names_its_last_frames_and_none_of_ours() -> None:
    def fault(depth: int) -> None:
        if depth == 0:
            raise OSError("gone")
        fault(depth - 1)

    with (
        pytest.raises(
            ValueError, match=r"^the tool raised OSError: gone \(test_user_code.py:\d+, (test|,|\w)"
        ),
        blamed("the tool"),
    ):
        fault(9)
    with pytest.raises(ValueError, match=r"^the tool raised OSError: gone$"), blamed("the tool"):
        raise OSError("gone")
