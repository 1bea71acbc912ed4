import ast
import importlib
import subprocess
import sys

import pytest

from tests.documents import BLOCKS, ROOT, Block

OURS = {"app", "deployments", "trainers"}
MODULES = ("slipstream", "slipstream.environments", "slipstream.publisher", "slipstream.training")
PROGRAMS = [each for each in BLOCKS if each.language == "python"]


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_documents_import_the_public_package_alone(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
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
