"""The site: every page is in its navigation, and its links lead where those of the documents lead."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = loaded()


class _Loader(yaml.SafeLoader):
    """mkdocs' configuration names a Python function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_in(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages_in(value) if isinstance(value, list) else [value]


def test_every_page_is_once_in_the_navigation() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    files = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages_in(config["nav"])) == sorted([*files, *site.INCLUDED])


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](docs/architecture.md#one-round)", "[a](architecture.md#one-round)"),
        ("index.md", "[a](SECURITY.md)", "[a](operating/security.md)"),
        ("index.md", "[`settings`](app/settings)", "`settings`"),
        ("index.md", "![a](docs/gap.svg)", "![a](gap.svg)"),
        ("guides/train.md", "[a](../../benchmarks/RESULTS.md)", "[a](../benchmarks/results.md)"),
        ("guides/train.md", "[a](../../README.md#b)", "[a](../index.md#b)"),
        ("guides/train.md", "[a](https://a.b/c.md) [b](#c)", "[a](https://a.b/c.md) [b](#c)"),
    ],
)
def test_a_link_leads_to_the_page_of_the_site(page: str, link: str, expected: str) -> None:
    assert site.with_links_of_the_site(link, page) == expected


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
