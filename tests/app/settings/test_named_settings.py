"""Every setting that a document, a configuration file or a message names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from app.settings.config import AppConfig
from app.settings.section import section_in

SECTIONS = [name for name, field in AppConfig.model_fields.items() if section_in(field.annotation)]
# A dotted lower-case name that begins with a section and is not a part of a path, a module's name or a call.
_NAME = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})(?:\.[a-z_][a-z0-9_]*)+)(?![\w(/]|\.[a-z])")
_FILE = re.compile(r"\.(py|md|json|log|yaml|safetensors|svg)$")
PAGES = [Path(name) for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "serve_config.yaml")] + [
    *sorted(Path("docs").rglob("*.md")),
    *sorted(Path("app/layouts").glob("*.yaml")),
]
MODULES = [path for top in ("app", "deployments", "trainers") for path in sorted(Path(top).rglob("*.py"))]


def exists(name: str) -> bool:
    current: type[BaseModel] | None = AppConfig
    for part in name.split("."):
        if current is None or part not in current.model_fields:
            return False
        annotation = current.model_fields[part].annotation
        if "extra" in part or part == "env":  # further arguments of vLLM, and variables
            return True
        current = section_in(annotation)
    return True


def wrong_names(text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if not exists(name) and _FILE.search(name) is None]


def messages(path: Path) -> Iterator[str]:
    """The texts in a module, docstrings included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_settings_that_a_page_names_exist() -> None:
    assert [(page, name) for page in PAGES for name in wrong_names(page.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_settings_that_messages_name_exist() -> None:
    wrong = [(str(path), name) for path in MODULES for text in messages(path) for name in wrong_names(text)]
    assert wrong == []
