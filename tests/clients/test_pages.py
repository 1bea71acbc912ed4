"""What the pages in `docs/clients` tell a user to type."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.environments import HERE, python_of
from tests.fleet.deployed import MODEL, Fleet

ROOT = HERE.parents[1]
PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
OURS = {"openai"}  # pages whose client is in our own environment
# By how it begins: where a page's command is run, by the test that is named or as it stands here.
COMMANDS = {
    "make serve": "tests/fleet/test_launched.py",
    "pip install ": "tests/clients/environments.py",  # the same versions: see below
    "python3.11 -m venv ": "tests/clients/environments.py",
    "export ": "tests/clients/test_verifiers.py",
    "vf-eval ": "tests/clients/test_verifiers.py",
    ".venv/bin/vllm bench serve ": "tests/clients/test_vllm_bench.py",
    # Pins other versions of Ray, vLLM and Python: the page says that it has not run.
    "python -m skyrl.train.": "docs/clients/skyrl.md",
}
pytestmark = [pytest.mark.clients]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The shell commands, each in one line."""
    text = "".join(blocks(page, "console")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


with_python = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_versions_are_those_that_are_tested(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 40
    for pinned in re.findall(r"[\w-]+==[\w.]+", page.read_text()):
        assert pinned in (HERE / "requirements" / f"{page.stem}.txt").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_of_a_page_is_run_by_a_test(page: Path) -> None:
    for command in commands(page):
        (where,) = (file for begin, file in COMMANDS.items() if command.startswith(begin))
        assert (ROOT / where).exists(), where


def test_no_command_of_the_table_has_gone_from_the_pages() -> None:
    every = [command for page in PAGES for command in commands(page)]
    assert [begin for begin in COMMANDS if not any(each.startswith(begin) for each in every)] == []


@pytest.mark.serve
@pytest.mark.fleet("shared")
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", with_python, ids=lambda page: page.stem)
def test_a_pages_programs_run(page: Path, fleet: Fleet, tmp_path: Path) -> None:
    python = Path(sys.executable) if page.stem in OURS else python_of(page.stem)
    for number, block in enumerate(blocks(page, "python")):
        program = tmp_path / f"{number}.py"
        program.write_text(block.replace("http://127.0.0.1:8000", fleet.url).replace("smollm2-135m", MODEL))
        done = subprocess.run([str(python), program], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout
