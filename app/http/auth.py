"""Access control: operator and user tokens; an exposed fleet without tokens is refused.

Tokens come as `Authorization: Bearer`, as `x-api-key` (Anthropic's clients) or as Basic authentication's
password (browsers, `http://x:TOKEN@host`).
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import time
from enum import Enum, auto
from hashlib import sha256
from urllib.parse import urlsplit

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import ProxyLocation
from starlette.requests import Request

from app.settings.security import Tokens, TokenSource, is_loopback, read_token_file
from deployments.host.logs import serve_logger
from deployments.protocol.errors import Conflict, SlipstreamError

FILE_PERIOD_S = 5.0
SERVE_TIMEOUT_S = 30.0
OPERATORS_ROUTES = frozenset({"/server_info"})  # forwarded, but shows the engine's settings
READING = frozenset({"GET", "HEAD", "OPTIONS"})
logger = serve_logger()


class Access(Enum):
    OPEN = auto()
    USER = auto()
    OPERATOR = auto()


def passed_access(path: str) -> Access:
    return Access.OPERATOR if path in OPERATORS_ROUTES else Access.USER


class Unauthorized(SlipstreamError):
    status = 401
    type = "unauthorized"


class Forbidden(SlipstreamError):
    """A user's token, or another web page's request, on an operator's route."""

    status = 403
    type = "forbidden"


class Guard:
    def __init__(self, tokens: Tokens) -> None:
        self._operator = _Known(tokens.operator, "the operator's")
        self._user = _Known(tokens.user, "the users'")

    def asks(self, access: Access) -> bool:
        return (access is Access.OPERATOR and bool(self._operator)) or (
            access is Access.USER and bool(self._user)
        )

    def check(self, request: Request, access: Access) -> None:
        """Raises Unauthorized (no token, or unknown) or Forbidden (a user's token on an operator's route, or
        a request from another web page)."""
        if access is Access.OPERATOR and request.method not in READING:
            self._refuse_other_pages(request)
        if not self.asks(access):
            return
        given = _digest(_given(request))
        if self._operator.has(given):
            return
        is_user = self._user.has(given)
        if is_user and access is Access.USER:
            return
        whose = "the operator's token" if access is Access.OPERATOR else "a token"
        if is_user:
            raise Forbidden(f"{request.url.path} needs {whose}, got a user's")
        raise Unauthorized(
            f"{request.url.path} needs {whose}, in the header 'Authorization: Bearer <token>' or "
            "'x-api-key', or as the password of Basic authentication"
        )

    def owner(self, request: Request) -> str:
        """Owner of a request's rollouts: a digest of a user's token; "": the operator, or anyone where users
        need none."""
        if not self._user:
            return ""
        given = _digest(_given(request))
        return given.hex()[:32] if self._user.has(given) and not self._operator.has(given) else ""

    def _refuse_other_pages(self, request: Request) -> None:
        """CSRF: browsers attach stored credentials to any page's request."""
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        scheme = request.headers.get("authorization", "").partition(" ")[0].lower()
        if origin is None or (scheme == "bearer" and self._operator):  # never added by a browser itself
            return
        # DNS rebinding: without a token, a page whose name resolves to the fleet is same-origin.
        if origin.partition("://")[2] != host or not (self._operator or _is_address(host)):
            raise Forbidden(
                f"{request.url.path} is the operator's, and the web page {origin[:100]!r} is not: its host "
                f"is not {host[:100]!r}. A proxy before the fleet must pass the header 'Host' on unchanged"
            )


class _Known:
    def __init__(self, source: TokenSource, whose: str) -> None:
        self._file = source.file
        self._whose = whose
        self._digests = [_digest(token) for token in source.tokens]
        self._problem = ""
        self._next_check = time.monotonic() + FILE_PERIOD_S

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, given: bytes) -> bool:
        self._read_again()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found

    def _read_again(self) -> None:
        if self._file is None or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + FILE_PERIOD_S
        digests, problem = self._digests, ""
        try:
            digests = [_digest(token) for token in read_token_file(self._file)]
        except ValueError as error:
            problem = str(error)
        if problem not in ("", self._problem):
            logger.error(
                "the file of %s tokens cannot be read; the previous tokens stay valid: %s",
                self._whose,
                problem,
            )
        if digests != self._digests:
            logger.warning("the file of %s tokens was reloaded: %d tokens", self._whose, len(digests))
        self._digests, self._problem = digests, problem


def _given(request: Request) -> str:
    if "authorization" not in request.headers:
        return request.headers.get("x-api-key", "").strip()  # Anthropic's clients
    scheme, _, text = request.headers["authorization"].partition(" ")
    match scheme.lower():
        case "bearer":
            return text.strip()
        case "basic":
            try:
                pair = base64.b64decode(text.strip(), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return ""
            return pair.partition(":")[2]
    return ""


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class Exposed(Conflict):
    """Other hosts can reach routes that change the fleet."""


def listening_address() -> tuple[str, int] | None:
    """Serve's proxies', from Serve: a deployment cannot change them. None if Serve does not
    listen. Blocks."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:  # Serve is not running
        return None
    questions = [controller.get_http_config.remote(), controller.get_proxy_location.remote()]
    http, location = ray.get(questions, timeout=SERVE_TIMEOUT_S)
    if ProxyLocation.Disabled in (location, http.location):
        return None
    return http.host, http.port


async def require_guarded(*, has_token: bool) -> None:
    """Raise `Exposed` if other hosts can reach Serve and there is no operator token. Serve may start after
    the application was built."""
    address = None if has_token else await asyncio.to_thread(listening_address)
    if address is not None and not is_loopback(address[0]):
        raise Exposed(
            f"Serve listens on {address[0]!r}, which other hosts can reach: expected a token in "
            "SLIPSTREAM_TOKEN or in the file 'security.token_file', got none"
        )
