import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = {"app", "deployments", "trainers"}
MODULES = ("slipstream", "slipstream.publisher", "slipstream.training")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_import_the_public_package_alone(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & OURS, names
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                public = importlib.import_module(node.module)
                assert {each.name for each in node.names} <= set(public.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        text = value.__doc__ or ""
        assert isinstance(value, str) or (text and not text.startswith(f"{public}(")), (
            public
        )  # a dataclass's own


@pytest.mark.slow
def test_the_client_loads_neither_torch_nor_ray_nor_vllm() -> None:
    code = "import sys, slipstream; print({'torch', 'ray', 'vllm'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "none"
