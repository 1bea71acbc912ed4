import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings.models import is_offline, resolve_model


def test_a_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert is_offline(str(tmp_path))


def test_a_hub_id_is_left_to_the_hub() -> None:
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert not is_offline("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "/no/such/model",
            "expected a directory with a config.json, got /no/such/model, which does not exist",
        ),
        ("./nowhere", "does not exist"),
        ("a/b/c", "expected 'smollm2-135m', a local directory, or a Hugging Face id"),
        ("smollm2-135M", "did you mean 'smollm2-135m'?"),
    ],
)
def test_a_name_that_is_no_model_gets_a_sentence(name: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    assert complaint in str(caught.value)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which has none"):
        resolve_model(str(tmp_path))


def test_the_command_prints_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "app.settings.models", "prepare"]
    environment = {**os.environ, "SLIPSTREAM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path)
    failed = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1 and "does not exist" in failed.stderr
