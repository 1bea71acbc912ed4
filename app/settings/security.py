"""The section `security`: the address of the fleet, and the tokens of its operator and of its users.

Serve logs and displays what a configuration holds, so a configuration names a file and holds no token.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from app.settings.errors import ConfigError
from app.settings.section import Section
from app.settings.tokens import is_loopback, read_token_file, read_tokens

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
OPERATOR_VARIABLE, USER_VARIABLE = "SLIPSTREAM_TOKEN", "SLIPSTREAM_USER_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTokens:
    """The tokens of a fleet; empty: nobody is asked."""

    operator: tuple[str, ...] = field(default=(), repr=False)
    user: tuple[str, ...] = field(default=(), repr=False)


class SecurityConfig(Section):
    """Who can reach the fleet, and with which tokens.

    The operator's token opens every route; the users' opens those that generate. See SECURITY.md.
    """

    host: str = "127.0.0.1"  # the same as http_options.host
    token_file: AbsolutePath | None = None  # the operator's; None: the environment variable SLIPSTREAM_TOKEN
    user_token_file: AbsolutePath | None = None  # None: SLIPSTREAM_USER_TOKEN; without both users need none
    # Directories below which an operator may publish checkpoints, beside the fleet's own store, and load
    # adapters. Every host of the fleet must see them at the same path. Whoever may write there decides what
    # the fleet serves.
    checkpoint_roots: tuple[AbsolutePath, ...] = ()

    def tokens(
        self, environment: Mapping[str, str] = os.environ, *, host: str | None = None
    ) -> ConfiguredTokens:
        """The tokens that callers need.

        Args:
            host: where Serve listens; None: `host` of this section.

        Raises:
            ConfigError: no operator's token although other hosts can connect, or users have one; an empty or
                unreadable file; a token that is too short, or the same for both.
        """
        operator = _tokens("token_file", self.token_file, OPERATOR_VARIABLE, environment)
        user = _tokens("user_token_file", self.user_token_file, USER_VARIABLE, environment)
        if set(operator) & set(user):
            raise ConfigError("'security.user_token_file': expected another token than the operator's")
        where = "or in the file 'security.token_file', got none"
        for name, address in (("security.host", self.host), ("http_options.host", host)):
            if not operator and address is not None and not is_loopback(address):
                raise ConfigError(
                    f"'{name}' is {address!r}, which other hosts can reach: expected a token in "
                    f"{OPERATOR_VARIABLE} {where}"
                )
        if user and not operator:
            raise ConfigError(
                f"users need a token: expected one of the operator in {OPERATOR_VARIABLE} {where}"
            )
        return ConfiguredTokens(operator=operator, user=user)


def _tokens(
    setting: str, file: Path | None, variable: str, environment: Mapping[str, str]
) -> tuple[str, ...]:
    try:
        if file is not None:
            return read_token_file(file)
    except ValueError as error:
        raise ConfigError(f"'security.{setting}': {error}") from error
    try:
        return read_tokens(environment.get(variable, ""))
    except ValueError as error:
        raise ConfigError(f"the environment variable {variable}: {error}") from error
