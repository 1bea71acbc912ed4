"""The section `security`: tokens of operator and users.

Serve logs and shows a configuration: it names files and holds no token. A file has one token per line, all
valid, so that tokens rotate while the fleet runs. No error shows a token.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from app.settings.section import ConfigError, Section


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"expected a directory, got {path}: no such user") from error


def _root(text: str) -> str:
    if "://" not in text:
        return str(_absolute(Path(text)))
    if not _URL.fullmatch(text):
        raise ValueError(  # without the URL, which may have a password
            "'security.checkpoint_roots': expected URLs as s3://bucket/run, without credentials or a query"
        )
    return text.rstrip("/")


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
CheckpointRoot = Annotated[str, AfterValidator(_root)]
OPERATOR_VARIABLE, USER_VARIABLE = "SLIPSTREAM_TOKEN", "SLIPSTREAM_USER_TOKEN"
MIN_CHARACTERS = 16
_URL = re.compile(r"[a-z0-9]+://[^\s?#*\\@:]+(:\d+)?(/[^\s?#*\\@:]+)*/?")  # no credentials: Serve shows it
_TOKEN = re.compile(r"[!-~]+")  # printable ASCII without spaces, for headers and URLs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    tokens: tuple[str, ...] = field(default=(), repr=False)
    file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Without operator or user tokens, that level's routes are open."""

    operator: TokenSource = TokenSource()
    user: TokenSource = TokenSource()


class SecurityConfig(Section):
    """The operator's tokens open every route, the users' those that generate. See SECURITY.md."""

    token_file: AbsolutePath | None = None
    """The operator's tokens, one a line. None: the environment variable SLIPSTREAM_TOKEN."""
    user_token_file: AbsolutePath | None = None
    """The users' tokens. None: the variable SLIPSTREAM_USER_TOKEN. Without both users need none."""
    checkpoint_roots: tuple[CheckpointRoot, ...] = ()
    """Directories and URLs (`s3://bucket/run`, `https://host/run`) below which an operator may publish
    checkpoints, beside the fleet's own store; adapters are loaded from directories only. Every host of the
    fleet must see the directories at the same path. Anyone who can write there decides what the fleet
    serves."""

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(Path(root) for root in self.checkpoint_roots if "://" not in root)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(root for root in self.checkpoint_roots if "://" in root)

    def tokens(self, environment: Mapping[str, str] = os.environ, *, host: str | None = None) -> Tokens:
        """`host` is where Serve listens. Raises ConfigError: a wrong token or file, or no operator token
        although other hosts can connect."""
        operator = _source("token_file", self.token_file, OPERATOR_VARIABLE, environment)
        user = _source("user_token_file", self.user_token_file, USER_VARIABLE, environment)
        if set(operator.tokens) & set(user.tokens):
            raise ConfigError("'security.user_token_file': expected another token than the operator's")
        where = "or in the file 'security.token_file', got none"
        if not operator.tokens and host is not None and not is_loopback(host):
            raise ConfigError(
                f"'http_options.host' is {host!r}, which other hosts can reach: expected a token in "
                f"{OPERATOR_VARIABLE} {where}"
            )
        if user.tokens and not operator.tokens:
            raise ConfigError(
                f"users need a token: expected one of the operator in {OPERATOR_VARIABLE} {where}"
            )
        return Tokens(operator=operator, user=user)


def _source(setting: str, file: Path | None, variable: str, environment: Mapping[str, str]) -> TokenSource:
    name = f"the environment variable {variable}" if file is None else f"'security.{setting}'"
    try:
        tokens = read_tokens(environment.get(variable, "")) if file is None else read_token_file(file)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    return TokenSource(tokens=tokens, file=file)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_tokens(text: str) -> tuple[str, ...]:
    """One per line. Raises ValueError."""
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    for number, token in enumerate(tokens, 1):
        if _TOKEN.fullmatch(token) is None:
            raise ValueError(
                f"token {number}: expected printable ASCII characters without spaces, got others"
            )
        if len(token) < MIN_CHARACTERS:
            raise ValueError(
                f"token {number}: expected at least {MIN_CHARACTERS} characters, got {len(token)} "
                "(for example of `openssl rand -hex 32`)"
            )
    return tokens


def read_token_file(file: Path) -> tuple[str, ...]:
    """Raises ValueError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"expected a readable file, got {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"expected a text file, got {file} ({error.reason})") from error
    tokens = read_tokens(text)
    if not tokens:
        raise ValueError(f"expected a file with a token, got {file}, which is empty")
    return tokens
