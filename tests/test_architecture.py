import ast
import re
from functools import cache
from pathlib import Path

from tests.documents import DOCUMENTS, ROOT

PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ("app", "deployments", "trainers")
# A path or a dotted name of ours in backticks; a path may end in a line number or a slash.
_NAME = re.compile(
    r"`((?:app|deployments|examples|trainers|tests|benchmarks|docs)(?:[./][A-Za-z0-9_.*/-]+)?)`"
)

PACKAGES = sorted(path.parent for top in SOURCE for path in (ROOT / top).rglob("__init__.py"))
DOTTED = {str(path.relative_to(ROOT)).replace("/", "."): path for path in PACKAGES}


def names_in(text: str) -> list[str]:
    return [match.rstrip("/") for match in _NAME.findall(text)]


def exists(name: str) -> bool:
    """Whether a path from the root, or a dotted name of a package or module, is in the tree."""
    dotted = ROOT / name.replace(".", "/")
    return (ROOT / name).exists() or dotted.exists() or dotted.with_suffix(".py").exists()


def test_every_package_is_on_the_page() -> None:
    on_the_page = {name.replace("/", ".") for name in names_in(PAGE.read_text(encoding="utf-8"))}
    assert set(DOTTED) - on_the_page == set()


def test_a_package_says_what_lives_in_it_and_names_what_exists() -> None:
    for package, directory in DOTTED.items():
        tree = ast.parse((directory / "__init__.py").read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree)
        assert docstring is not None, package
        assert len(tree.body) == 1, f"{package}: an __init__ holds its docstring and no code"
        assert "Read first:" in docstring, package
        assert [name for name in names_in(docstring) if not exists(name)] == [], package


_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


@cache
def anchors(document: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    for document in DOCUMENTS:
        for path, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
            target = document.parent / path if path else document
            assert target.exists(), f"{document}: {path}"
            assert not anchor or anchor in anchors(target), f"{document}: {path}#{anchor}"


_SHORT = {
    "D": "deployments/",
    "L": "deployments/ledger/",
    "T": "tests/deployments/",
    "TL": "tests/deployments/ledger/",
}
_PROMISED = re.compile(r"(?<![A-Za-z`])(TL|T|D|L)?`([\w./]+\.py)(?:::(\w+))?`(?:, `(\w+)`)?")


def test_the_files_functions_and_tests_that_promises_name_exist() -> None:
    rows = [
        line
        for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
        if line[:1] == "|"
    ]
    named = [
        (ROOT / (_SHORT.get(short, "") + path), test, function)
        for row in rows
        for short, path, test, function in _PROMISED.findall(row)
    ]
    assert len(named) > 100
    assert [path for path, _, _ in named if not path.exists()] == []
    assert [each for each in named if each[1] and f"def {each[1]}(" not in each[0].read_text()] == []
    lacking = [each for each in named if each[2] and not re.search(rf"\b{each[2]}\b", each[0].read_text())]
    assert lacking == []
