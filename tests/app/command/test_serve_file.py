from pathlib import Path
from typing import Any

import pytest
import yaml

from app.command.serve_file import ServeFile, read_serve_file
from app.settings.errors import ConfigError


def read(directory: Path, document: Any) -> ServeFile:
    path = directory / "serve_config.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return read_serve_file(path)


def application(**arguments: Any) -> dict[str, Any]:
    return {"name": "slipstream", "import_path": "app.main:build", "args": {"model": "m", **arguments}}


def test_the_default_file_says_where_it_listens() -> None:
    file = read_serve_file(Path("serve_config.yaml"))
    assert (file.url, file.application) == ("http://127.0.0.1:8000", "slipstream")
    assert file.document["applications"][0]["import_path"] == "app.main:build"


def test_serve_is_sent_an_absolute_state_directory(tmp_path: Path) -> None:
    file = read(tmp_path, {"applications": [application(state_dir="state")]})
    assert file.document["applications"][0]["args"]["state_dir"] == str(Path("state").absolute())


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("a: [", "expected YAML"),
        ("- 1", "expected one entry under 'applications', got none"),
        ({"applications": [application(), application()]}, "got 2"),
        ({"applications": [application(modle="x")]}, r"unknown setting 'modle' \(did you mean 'model'\?\)"),
        (
            {"http_options": {"host": "0.0.0.0"}, "applications": [application()]},
            r"expected the same address as 'security.host' \('127.0.0.1'\), got '0.0.0.0'",
        ),
        (
            {
                "http_options": {"host": "0.0.0.0"},
                "applications": [application(security={"host": "0.0.0.0"})],
            },
            "expected a token in SLIPSTREAM_TOKEN",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Any, complaint: str
) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, document)


def test_a_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_serve_file(tmp_path / "none.yaml")
