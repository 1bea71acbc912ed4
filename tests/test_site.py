import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from app.http.route import GuardedRoute
from app.settings.config import AppConfig
from app.settings.section import Section
from docs import references, site

ROOT = Path(__file__).parents[1]


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
    assert sorted(pages_in(config["nav"])) == sorted([*files, *site.INCLUDED, *references.PAGES])


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


def test_every_setting_has_a_description() -> None:
    assert references.undescribed() == []


def test_a_setting_without_a_description_is_named() -> None:
    assert references.undescribed(Undescribed) == ["engine", "engine.count"]


class _Engine(Section):
    count: int = 1
    size: int = 1
    """Of the engine."""


class Undescribed(Section):
    engine: _Engine = _Engine()


@pytest.mark.slow
def test_the_configuration_has_a_row_for_every_setting() -> None:
    text = references.configuration()
    for path, section in references.sections(AppConfig):
        _, _, rest = text.partition(f"\n## `{path}`\n" if path else "\n## The application\n")
        rows = rest.partition("\n## ")[0]
        assert [name for name in section.model_fields if f"| `{name}` |" not in rows] == []
    assert "| `chunk_bytes` | int at least 65,536 and at most 4,294,967,296 or `null` | `null` |" in text
    assert "| `dtype` | `auto`, `float32`, `bfloat16`, `float16` | `auto` |" in text


@pytest.mark.slow
def test_the_routes_have_what_openapi_has() -> None:
    text = references.http()
    assert re.findall(r"^\| `.*\|  \|$", text, re.M) == [], "parameters without a meaning"
    described = [route for route in references.own_application().routes if isinstance(route, GuardedRoute)]
    described = [route for route in described if route.include_in_schema]
    assert [each.path for each in described if f"### {each.allowed[0]} {each.path}\n" not in text] == []
    assert len(described) > 30
    assert (
        "| `path` | body | text | required |" in text.partition("POST /fleet/publish")[2].partition("###")[0]
    )
    assert "`POST /v1/chat/completions` | a user's token" in text and "| `/collective_rpc` |" in text


@pytest.mark.slow
def test_the_command_line_has_every_command_with_its_options() -> None:
    text = references.command_line()
    for command in ("serve", "status", "publish", "rollback", "scale"):
        assert f"## `slipstream {command}`\n" in text
    assert "| `--url` | `http://127.0.0.1:8000` |" in text
    assert "| `--steps` | `20` |" in text, "options of the job, which rl passes on"


def test_each_family_has_a_row_with_the_devices_on_which_it_passed_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = dict.fromkeys(("served", "trained", "published", "stored"), "yes")
    failed = {"served": "yes", "trained": "TypeError: a | b"}
    results = {"a": {"class": "A", "cpu": passed, "cuda": passed}, "b": {"class": "B", "cpu": failed}}
    monkeypatch.setattr(references, "RESULTS", tmp_path / "models.json")
    references.RESULTS.write_text(json.dumps(results), encoding="utf-8")
    text = references.families()
    assert text.startswith("Of 2 families all three passed for 1 on a CPU, 1 on a GPU.\n")
    assert "| `a` | `A` | CPU, GPU | CPU, GPU | CPU, GPU |  |\n" in text
    assert "| `b` | `B` |  |  |  | CPU, trained: TypeError: a \\| b |\n" in text


def test_the_page_of_models_is_made_with_what_ran() -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    page = site.on_page_markdown(
        page, SimpleNamespace(file=SimpleNamespace(src_uri="reference/models.md")), {}, []
    )
    assert "| `llama` | `LlamaForCausalLM` | CPU" in page


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
