import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.command.deploy import read_serve_file
from app.settings.config import parse_config
from app.settings.section import ConfigError
from tests.app.settings.complaints import COLOCATED

LAYOUTS = Path("app/layouts")


def test_only_the_model_is_required() -> None:
    config = parse_config({"model": "m"})
    assert config.public_model_name == "m"
    assert config.trainer is None
    assert config.state_dir.is_absolute()
    assert config.store_path == config.state_dir / "store"


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    assert str(caught.value) == "missing setting 'model': expected a value, got none"


def test_a_served_name_replaces_the_models() -> None:
    assert parse_config({"model": "m", "served_model_name": "n"}).public_model_name == "n"


@pytest.mark.parametrize("file", sorted(LAYOUTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_layout_is_valid(file: Path) -> None:
    assert read_serve_file(file).config.device == "cuda"
    assert f"serve run app/layouts/{file.name}" in file.read_text(), "its comment has the command"


def test_a_colocated_configuration_is_accepted() -> None:
    assert parse_config({"model": "m", **COLOCATED}).weights.transport == "ipc"


def test_adapters_are_loaded_from_the_users_roots_and_from_the_trainers_own_directory(tmp_path: Path) -> None:
    users = {"security": {"checkpoint_roots": ["/data"]}, "state_dir": str(tmp_path)}
    adapting = {
        "trainer": {"lora": {"name": "math"}},
        "engine": {"extra": {"enable_lora": True, "max_loras": 2}},
    }
    assert parse_config({"model": "m", **users}).adapter_roots == (Path("/data"),)
    own = tmp_path / "store" / "trainer" / "adapters"
    assert parse_config({"model": "m", **users, **adapting}).adapter_roots == (own, Path("/data"))


def test_a_merged_adapter_asks_nothing_of_the_engines(tmp_path: Path) -> None:
    merged = {"trainer": {"lora": {"publish": "merged", "rank": 64}}, "state_dir": str(tmp_path)}
    made = parse_config({"model": "m", **merged})
    assert not made.engine.serves_adapters and made.adapter_roots == ()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_config({"model": "m"}).engine.num_replicas = 3  # type: ignore[misc]


@pytest.mark.slow
def test_importing_the_configuration_and_the_launcher_imports_nothing_heavy() -> None:
    program = (
        "import sys, app.settings.config, app.command.launch, app.command.cli, app.command.submit\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
