import re

import httpx
import pytest

from app.http.ingress import PAGE, PAGE_FILES
from tests.app.http.fake_controller import FakeController
from tests.app.http.serving import client


@pytest.mark.parametrize("token", [None, "operator-0123456789"])
async def test_page_and_its_files_are_open_and_never_stale(token: str | None) -> None:
    async with client(FakeController(), token=token) as fleet:
        for path, name in PAGE_FILES.items():
            answer: httpx.Response = await fleet.get(path)
            assert (answer.status_code, answer.content) == (200, (PAGE / name).read_bytes())
            assert answer.headers["cache-control"] == "no-cache"
        kinds = {path: (await fleet.head(path)).headers["content-type"] for path in PAGE_FILES}
    assert [kind.partition(";")[0] for kind in kinds.values()] == [
        "text/html",
        "text/css",
        "text/javascript",
        "text/javascript",
        "text/css",
    ]


def test_page_needs_no_other_host_and_its_paths_work_below_any_prefix() -> None:
    html = (PAGE / "page.html").read_text(encoding="utf-8")
    assert {f"/{each}" for each in re.findall(r'"(page/[^"]*)"', html)} == PAGE_FILES.keys() - {"/"}
    script, style = ((PAGE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    assert "http://${load.dashboard}" in script
    assert not re.search(r"https?://(?!\$\{load\.dashboard\})", html + script + style)
    assert not re.search(r"""(ask|fetch)\(["'`]/""", script), "from the root: a proxy's prefix would be lost"
