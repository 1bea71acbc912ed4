"""When the application asks for tokens, and where it takes them from."""

from pathlib import Path

import pytest

from app.settings.config import parse_config
from app.settings.section import ConfigError
from app.settings.security import SecurityConfig

OPERATOR, USER = "operator-0123456789", "user-0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    assert SecurityConfig().tokens({}, host=host).operator.tokens == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_any_other_address_needs_the_operators_token(host: str) -> None:
    with pytest.raises(ConfigError, match="expected a token in SLIPSTREAM_TOKEN"):
        SecurityConfig().tokens({"SLIPSTREAM_TOKEN": " "}, host=host)
    tokens = SecurityConfig().tokens({"SLIPSTREAM_TOKEN": OPERATOR}, host=host)
    assert (tokens.operator.tokens, tokens.user.tokens) == ((OPERATOR,), ())


def test_users_have_a_token_where_one_is_configured_and_the_operator_has_one() -> None:
    security = SecurityConfig()
    given = {"SLIPSTREAM_TOKEN": OPERATOR, "SLIPSTREAM_USER_TOKEN": f" {USER}\n"}
    assert security.tokens(given).user.tokens == (USER,)
    with pytest.raises(ConfigError, match="users need a token: expected one of the operator"):
        security.tokens({"SLIPSTREAM_USER_TOKEN": USER})
    with pytest.raises(ConfigError, match="expected another token than the operator's") as caught:
        security.tokens({"SLIPSTREAM_TOKEN": OPERATOR, "SLIPSTREAM_USER_TOKEN": OPERATOR})
    assert OPERATOR not in str(caught.value)


@pytest.mark.parametrize("setting", ["token_file", "user_token_file"])
def test_a_token_file_wins_and_must_hold_tokens(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "token"
    security = SecurityConfig.model_validate({setting: file})
    environment = {"SLIPSTREAM_TOKEN": OPERATOR}
    with pytest.raises(ConfigError, match=f"'security.{setting}': expected a readable file, got .*No such"):
        security.tokens(environment)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        security.tokens(environment)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="expected a text file"):
        security.tokens(environment)
    file.write_text("first-0123456789abc\n\n second-0123456789ab\n")
    tokens = security.tokens(environment)
    read = tokens.operator if setting == "token_file" else tokens.user
    assert read.tokens == ("first-0123456789abc", "second-0123456789ab")


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        ("s3cret", "expected at least 16 characters, got 6"),
        ("with a space 0123456789", "without spaces"),
        ("naïve-0123456789abcdef", "printable ASCII"),
    ],
)
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused_and_not_shown(
    token: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        SecurityConfig().tokens({"SLIPSTREAM_TOKEN": token})
    assert token not in str(caught.value)


def test_checkpoints_may_be_published_from_the_store_and_what_is_named(tmp_path: Path) -> None:
    config = parse_config({"model": "m", "state_dir": str(tmp_path)})
    assert config.checkpoint_roots == (tmp_path / "store",)
    security = {"checkpoint_roots": ["/data/run 1", "relative"]}
    config = parse_config({"model": "m", "state_dir": str(tmp_path), "security": security})
    assert config.checkpoint_roots == (tmp_path / "store", Path("/data/run 1"), Path.cwd() / "relative")
    with pytest.raises(ConfigError, match=r"security\.checkpoint_roots"):
        parse_config({"model": "m", "security": {"checkpoint_roots": "/data"}})


def test_a_url_below_which_checkpoints_may_be_published_is_no_directory(tmp_path: Path) -> None:
    security = {"checkpoint_roots": ["s3://bucket/run/", "/data", "http://host:9000/run"]}
    config = parse_config({"model": "m", "state_dir": str(tmp_path), "security": security})
    assert config.security.urls == ("s3://bucket/run", "http://host:9000/run")
    assert config.checkpoint_roots == (tmp_path / "store", Path("/data"))
    for root in ("s3://", "https://user:secret@host/run", "s3://bucket/a::file:///", "https://host/run?a=1"):
        with pytest.raises(ConfigError, match=r"security\.checkpoint_roots': expected URLs as s3"):
            parse_config({"model": "m", "security": {"checkpoint_roots": [root]}})
    with pytest.raises(ConfigError, match=r"'store\.shared': expected true with a URL"):
        parse_config({"model": "m", "security": security, "store": {"shared": False}})
