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
pytestmark = [pytest.mark.clients]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


with_python = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_versions_are_those_that_are_tested(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 40
    for pinned in re.findall(r"[\w-]+==[\w.]+", page.read_text()):
        assert pinned in (HERE / "requirements" / f"{page.stem}.txt").read_text().splitlines()


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
