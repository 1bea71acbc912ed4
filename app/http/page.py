"""The web page at `/`: the fleet, live."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

HTML = Path(__file__).with_name("page.html")


async def page(request: Request) -> Response:
    """The page; it fetches everything that it shows from the fleet's own routes."""
    return HTMLResponse(HTML.read_text(encoding="utf-8"))
