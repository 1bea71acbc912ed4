from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app.command.cli import cli
from app.command.deploy import read_serve_file
from app.settings.config import AppConfig, parse_config

ROOT = Path(__file__).parents[3]
LAYOUTS = [ROOT / "serve_config.yaml", *sorted((ROOT / "app" / "layouts").glob("*.yaml"))]


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_what_is_shown_is_the_same_configuration_with_its_defaults(path: Path) -> None:
    result = CliRunner().invoke(cli, ["config", "show", str(path)], env={"SLIPSTREAM_TOKEN": "t" * 16})
    assert result.exit_code == 0, result.stderr
    shown = yaml.safe_load(result.stdout)
    assert set(shown) == set(AppConfig.model_fields)
    assert parse_config(shown) == read_serve_file(path).config


def test_a_valid_file_is_summed_up() -> None:
    result = CliRunner().invoke(cli, ["config", "check", str(LAYOUTS[0])])
    assert result.exit_code == 0
    assert (
        "is valid: 2 replicas of smollm2-135m on cpu, a trainer (single), at http://127.0.0.1:8000"
        in result.stdout
    )


def test_what_is_wrong_is_said_and_ends_a_start_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": {"model": "m", "engin": {}}}]}))
    for command in (["config", "check"], ["config", "show"], ["serve", "--config"]):
        result = CliRunner().invoke(cli, [*command, str(config)])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "slipstream: unknown setting 'engin' (did you mean 'engine'?)\n"
