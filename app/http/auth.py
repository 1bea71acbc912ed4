"""Authorization: a bearer token guards every route that changes the fleet or the trainer."""

import hmac

from starlette.requests import Request

from deployments.errors import SlipstreamError

# Reading and generating is open to everybody who reaches the port, as with `vllm serve`.
OPEN_CONTROL_ROUTES = frozenset({"/health", "/fleet", "/fleet/rounds", "/fleet/events", "/metrics", "/"})


class Unauthorized(SlipstreamError):
    """The request needs the fleet's token."""

    status = 401
    type = "unauthorized"


class Guard:
    """Checks the token of control and train routes; without a token they are open (loopback only)."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def guards(self, path: str) -> bool:
        """Whether a request to one of our own routes needs the token."""
        return self._token is not None and path not in OPEN_CONTROL_ROUTES

    def check(self, request: Request) -> None:
        """Let the request pass.

        Raises:
            Unauthorized: no token, or another one.
        """
        if self._token is None or not self.guards(request.url.path):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Unauthorized(
                f"{request.url.path} needs the header 'Authorization: Bearer <token>' with the fleet's token"
            )
