"""The section `security`: the address of the fleet and the token of its control routes."""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, SecretStr

from app.settings.errors import ConfigError
from app.settings.section import Section

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class SecurityConfig(Section):
    """Who can reach the fleet, and the token that control and train routes require."""

    host: str = "127.0.0.1"  # the same as http_options.host
    token_file: AbsolutePath | None = None  # None: the environment variable SLIPSTREAM_TOKEN

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this host can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self, environment: Mapping[str, str] = os.environ) -> SecretStr | None:
        """The bearer token of control and train routes; None: no token is required (on loopback only).

        Raises:
            ConfigError: no token although other hosts can connect, or an empty or unreadable token file.
        """
        token = environment.get("SLIPSTREAM_TOKEN", "").strip()
        if self.token_file is not None:
            token = _read_token(self.token_file)
        if token:
            return SecretStr(token)
        if self.is_loopback:
            return None
        raise ConfigError(
            f"'security.host' is {self.host!r}, which other hosts can reach: expected a token in "
            "SLIPSTREAM_TOKEN or in the file 'security.token_file', got none"
        )


def _read_token(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"'security.token_file': expected a readable file, got {file} ({error.strerror})"
        ) from error
    if not token:
        raise ConfigError(f"'security.token_file': expected a file with a token, got {file}, which is empty")
    return token
