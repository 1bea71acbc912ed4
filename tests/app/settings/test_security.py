"""When the application asks for a bearer token, and where it takes it from."""

from pathlib import Path

import pytest

from app.settings.errors import ConfigError
from app.settings.security import SecurityConfig


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    assert SecurityConfig(host=host).token({}) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_any_other_address_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="expected a token in SLIPSTREAM_TOKEN"):
        SecurityConfig(host=host).token({"SLIPSTREAM_TOKEN": " "})
    token = SecurityConfig(host=host).token({"SLIPSTREAM_TOKEN": "s3cret"})
    assert token is not None and token.get_secret_value() == "s3cret"


def test_a_token_file_wins_and_must_hold_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    security = SecurityConfig(token_file=file)
    with pytest.raises(ConfigError, match="No such file"):
        security.token({})
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        security.token({"SLIPSTREAM_TOKEN": "other"})
    file.write_text("s3cret\n")
    token = security.token({"SLIPSTREAM_TOKEN": "other"})
    assert token is not None and token.get_secret_value() == "s3cret"
