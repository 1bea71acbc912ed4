"""docs/architecture.md and the packages' docstrings agree with the tree, its imports and the contracts."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ("app", "deployments", "trainers")
# A path or a dotted name of ours in backticks; a path may end in a line number or a slash.
_NAME = re.compile(r"`((?:app|deployments|trainers|tests|benchmarks|docs)(?:[./][A-Za-z0-9_.*/-]+)?)`")

PACKAGES = sorted(path.parent for top in SOURCE for path in (ROOT / top).rglob("__init__.py"))
DOTTED = {str(path.relative_to(ROOT)).replace("/", "."): path for path in PACKAGES}


def names_in(text: str) -> list[str]:
    return [match.rstrip("/") for match in _NAME.findall(text)]


def exists(name: str) -> bool:
    """Whether a path from the root, or a dotted name of a package or module, is in the tree."""
    dotted = ROOT / name.replace(".", "/")
    return (ROOT / name).exists() or dotted.exists() or dotted.with_suffix(".py").exists()


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def rooms() -> dict[str, set[str]]:
    """The table "Who may import whom": each room, and the rooms that it may import."""
    section = PAGE.read_text(encoding="utf-8").split("### Who may import whom")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {names_in(room)[0]: set(names_in(targets)) for room, targets in cells}


def room_of(module: str) -> str | None:
    """The room of the table that a module belongs to: the longest name that it begins with."""
    found = [room for room in rooms() if module == room or module.startswith(f"{room}.")]
    return max(found, key=len, default=None)


@cache
def imports_between_rooms() -> frozenset[tuple[str, str]]:
    return frozenset(_imports_between_rooms())


def _imports_between_rooms() -> Iterator[tuple[str, str]]:
    for top in SOURCE:
        for file in (ROOT / top).rglob("*.py"):
            room = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            for target in map(room_of, imports_of(file)):
                if room is not None and target is not None and target != room:
                    yield room, target


def contracts(kind: str) -> list[dict[str, list[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return [contract for contract in settings["contracts"] if contract["type"] == kind]


def test_every_package_is_on_the_page() -> None:
    on_the_page = {name.replace("/", ".") for name in names_in(PAGE.read_text(encoding="utf-8"))}
    assert set(DOTTED) - on_the_page == set()


def test_every_file_and_module_that_the_page_names_exists() -> None:
    wrong = [name for name in names_in(PAGE.read_text(encoding="utf-8")) if not exists(name)]
    assert wrong == []


@pytest.mark.parametrize("package", DOTTED)
def test_a_package_says_what_lives_in_it_and_names_what_exists(package: str) -> None:
    tree = ast.parse((DOTTED[package] / "__init__.py").read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    assert docstring is not None
    assert len(tree.body) == 1, "a package's __init__ holds its docstring and no code"
    assert "Read first:" in docstring
    assert [name for name in names_in(docstring) if not exists(name)] == []


def test_every_import_between_rooms_is_in_the_table() -> None:
    allowed = rooms()
    assert {
        (room, target) for room, target in imports_between_rooms() if target not in allowed[room]
    } == set()


def test_every_arrow_of_the_table_is_used() -> None:
    used: dict[str, set[str]] = {room: set() for room in rooms()}
    for module, imported in imports_between_rooms():
        used[module].add(imported)
    assert {room: targets - used[room] for room, targets in rooms().items() if targets - used[room]} == {}


def test_every_module_belongs_to_a_room_of_the_table() -> None:
    files = (file for top in SOURCE for file in (ROOT / top).rglob("*.py") if file.name != "__init__.py")
    modules = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    assert [module for module in modules if room_of(module) is None] == []


def test_the_table_agrees_with_the_contracts_on_who_may_import_a_room() -> None:
    table = rooms()
    for contract in contracts("protected"):
        for protected in contract["protected_modules"]:
            if protected.split(".")[0] in SOURCE:
                importers = {room for room, targets in table.items() if protected in targets}
                assert importers == set(contract["allowed_importers"]), protected


def test_every_room_with_a_process_of_its_own_is_protected_by_a_contract() -> None:
    protected = {name for contract in contracts("protected") for name in contract["protected_modules"]}
    packages = {name for name in DOTTED if name.startswith("deployments.")}
    for_all = {"deployments.weights", "deployments.protocol"}  # four rooms of their own, and the messages
    covered = {name for name in packages if any(f"{name}.".startswith(f"{each}.") for each in protected)}
    assert packages - covered - for_all == set()
