"""Who may call which route: a token for the operator, and one for users where the operator wants it.

A token comes as `Authorization: Bearer`, as the API key of OpenAI's clients (which is the same), or as the
password of Basic authentication: browsers ask for that, and clients that only have an address carry it there
(`http://x:TOKEN@host`).
"""

import base64
import binascii
import hmac
import ipaddress
import os
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from app.settings.security import read_token_file
from deployments.host.logs import serve_logger
from deployments.protocol.errors import SlipstreamError

FILE_PERIOD_S = 5.0  # how soon a changed token file counts
OPERATORS_ROUTES = frozenset({"/server_info"})  # of those that pass through: it shows the engine's settings
READING = frozenset({"GET", "HEAD", "OPTIONS"})
logger = serve_logger()


class Access(Enum):
    """Whom a route is for."""

    OPEN = auto()  # everybody
    USER = auto()  # whoever has a token of the users', or of the operator's
    OPERATOR = auto()


def passed_access(path: str) -> Access:
    """Whom a route is for that passes through to a replica."""
    return Access.OPERATOR if path in OPERATORS_ROUTES else Access.USER


class Unauthorized(SlipstreamError):
    """The request needs a token."""

    status = 401
    type = "unauthorized"


class Forbidden(SlipstreamError):
    """The request comes from a user, or from another web page, and the route is the operator's."""

    status = 403
    type = "forbidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Tokens, and the file that they were read from; it may change while the fleet runs."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a fleet. Without one of a kind, nobody is asked for that kind."""

    operator: TokenSource = TokenSource()
    user: TokenSource = TokenSource()


class Guard:
    """Checks the token of each request."""

    def __init__(self, tokens: Tokens) -> None:
        self._operator = _Known(tokens.operator, "the operator's")
        self._user = _Known(tokens.user, "the users'")

    def asks(self, access: Access) -> bool:
        """Whether a route needs a token."""
        return (access is Access.OPERATOR and bool(self._operator)) or (
            access is Access.USER and bool(self._user)
        )

    def check(self, request: Request, access: Access) -> None:
        """Let the request pass.

        Raises:
            Unauthorized: no token, or an unknown one.
            Forbidden: a user's token for a route of the operator's, or a request that another web page sent.
        """
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
            f"{request.url.path} needs {whose}, in the header 'Authorization: Bearer <token>' "
            "or as the password of Basic authentication"
        )

    def _refuse_other_pages(self, request: Request) -> None:
        """A browser sends what any page asks for, with the credentials that it has stored for the fleet."""
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is None:
            return
        # Without a token a page could also give its own name the fleet's address, and call itself the same.
        if urlsplit(origin).netloc != host or not (self._operator or _is_address(host)):
            raise Forbidden(f"{request.url.path} is the operator's, and the web page {origin[:100]!r} is not")


class _Known:
    """The digests of the tokens of one kind."""

    def __init__(self, source: TokenSource, whose: str) -> None:
        self._file = source.file
        self._whose = whose
        self._digests = [_digest(token) for token in source.tokens]
        self._state = self._file_state()
        self._next_check = time.monotonic() + FILE_PERIOD_S

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, given: bytes) -> bool:
        """Whether it is one of them; takes the same time whichever it is, and if it is none."""
        self._read_again()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found

    def _read_again(self) -> None:
        if self._file is None or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + FILE_PERIOD_S
        state = self._file_state()
        if state in (None, self._state):
            return
        self._state = state
        try:
            self._digests = [_digest(token) for token in read_token_file(self._file)]
            logger.warning("the file of %s tokens has changed: %d count now", self._whose, len(self._digests))
        except ValueError as error:
            logger.error(
                "the file of %s tokens has changed, and the tokens before count on: %s", self._whose, error
            )

    def _file_state(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:  # not on this host, or being replaced: the tokens that were read count on
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _given(request: Request) -> str:
    """The token that a request carries; empty if it carries none."""
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
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
    """Whether a Host header names an address and not a name that anybody can give to it."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True
