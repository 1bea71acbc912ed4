"""Bearer tokens, as a file or an environment variable holds them; no error names one.

A file has one token a line, and each of them counts: an operator adds a token, moves the clients, and removes
the old one, while the fleet runs.
"""

import ipaddress
import re
from pathlib import Path

MIN_CHARACTERS = 16
_TOKEN = re.compile(r"[!-~]+")  # printable ASCII without spaces: what a header and a URL can carry


def is_loopback(host: str) -> bool:
    """Whether only programs on this host can connect to an address: no token is needed there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_tokens(text: str) -> tuple[str, ...]:
    """The tokens of a text, one a line; empty lines are none.

    Raises:
        ValueError: one of them is too short, or has other characters than a header can carry.
    """
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
    """The tokens of a file, at least one.

    Raises:
        ValueError: it cannot be read, is empty, or has a wrong token.
    """
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
