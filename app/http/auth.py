"""Who may do what: a bearer token guards every route that changes the fleet or the trainer."""

import hmac

from starlette.requests import Request

from deployments.errors import SlipstreamError

# Reading and generating is for everybody who reaches the port, as with `vllm serve`.
OPEN_CONTROL_ROUTES = frozenset({"/health", "/fleet", "/fleet/rounds", "/fleet/events", "/metrics", "/"})


class Unauthorized(SlipstreamError):
    status = 401
    type = "unauthorized"


class Guard:
    """Checks the token of control and train routes; without a token they are open (loopback only)."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, request: Request) -> None:
        """
        Raises:
            Unauthorized: no token, or another one.
        """
        if self._token is None or request.url.path in OPEN_CONTROL_ROUTES:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Unauthorized(
                f"{request.url.path} needs the header 'Authorization: Bearer <token>' with the fleet's token"
            )
