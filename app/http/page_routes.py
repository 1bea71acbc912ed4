"""The web page and its files. They contain no fleet data; the page fetches it with a token."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi.responses import FileResponse

from app.http.auth import Access
from app.http.route import GuardedRoute

FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": "page.html",
    **{f"/page/{name}": name for name in ("page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")},
}


def page_routes() -> list[GuardedRoute]:
    return [
        GuardedRoute(
            "GET",
            path,
            _sender(FOLDER / name),
            access=Access.OPEN,
            response_class=FileResponse,
            include_in_schema=False,
        )
        for path, name in FILES.items()
    ]


def _sender(file: Path) -> Callable[[], Awaitable[FileResponse]]:
    async def send() -> FileResponse:
        return FileResponse(file, headers={"cache-control": "no-cache"})

    return send
