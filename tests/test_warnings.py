"""A warning fails a test if our code gives it, and only then."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = "/opt/venv/lib/python3.11/site-packages"

ours = pytest.mark.parametrize(
    ("module", "fails"),
    [
        ("app.http.routes", True),
        ("deployments", True),
        ("trainers.loop", True),
        ("tests.test_warnings", True),
        (f"{ROOT}/app/http/routes", True),  # as the compiler names it
        ("cellpylib.entropy", False),
        ("apple.trees", False),
        ("ray.serve.tests.conftest", False),
        (f"{INSTALLED}/cellpylib/entropy", False),
        (f"{INSTALLED}/numpy/tests/test_matlib", False),
    ],
)


@ours
def test_a_warning_fails_a_test_where_the_module_is_ours(module: str, fails: bool) -> None:
    for category in (DeprecationWarning, SyntaxWarning, UserWarning, RuntimeWarning):
        with pytest.raises(category) if fails else nullcontext():
            warnings.warn_explicit("what is written here", category, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("below, fails", [("app", True), ("site-packages/cellpylib", False)])
def test_what_the_compiler_warns_of_is_known_by_its_path(below: str, fails: bool, tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) if fails else nullcontext():
        compile("1 is 1", str(tmp_path / below / "module.py"), "exec")
