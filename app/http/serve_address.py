"""Where Serve listens, asked of Serve itself: what a configuration says of it may not be what is running.

`serve run`, `serve deploy` and `serve.start` each set it, and an application that is deployed to a Serve that
runs already cannot change it. HAProxy and the router's own port listen on the same address.
"""

import asyncio
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import ProxyLocation

from app.settings.security import is_loopback
from deployments.protocol.errors import Conflict

ANSWER_TIMEOUT_S = 30.0


class Exposed(Conflict):
    """Other hosts can reach routes that change the fleet."""


def listening_host() -> str | None:
    """The address of Serve's proxies; None: no Serve runs that listens."""
    controller = _controller()
    if controller is None:
        return None
    http, location = ray.get(_questions(controller), timeout=ANSWER_TIMEOUT_S)
    return _host(http, location)


async def require_guarded(*, has_token: bool) -> None:
    """Return if Serve listens for this host only, or the operator has a token.

    Called where Serve runs for certain: it may have been started after the application was built.

    Raises:
        Exposed: neither.
    """
    if has_token or (controller := _controller()) is None:
        return
    http, location = await asyncio.wait_for(asyncio.gather(*_questions(controller)), ANSWER_TIMEOUT_S)
    host = _host(http, location)
    if host is not None and not is_loopback(host):
        raise Exposed(
            f"Serve listens on {host!r}, which other hosts can reach: expected a token in SLIPSTREAM_TOKEN "
            "or in the file 'security.token_file', got none"
        )


def _controller() -> Any:
    try:
        return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:  # Serve does not run
        return None


def _questions(controller: Any) -> list[Any]:
    return [controller.get_http_config.remote(), controller.get_proxy_location.remote()]


def _host(http: Any, location: Any) -> str | None:
    if location == ProxyLocation.Disabled or http.location == ProxyLocation.Disabled:
        return None
    host: str | None = http.host
    return host
