"""`slipstream config`: a configuration file checked, with its defaults, and the schema of its settings."""

import json
import sys
from pathlib import Path

import yaml

from app.command.deploy import ServeFile, read_serve_file
from app.settings.config import AppConfig
from app.settings.section import ConfigError


def check(path: Path) -> int:
    """Print what is wrong, as a start would; returns the exit status."""
    file = _read(path)
    if file is None:
        return 1
    config = file.config
    trains = "no trainer" if config.trainer is None else f"a trainer ({config.trainer.strategy})"
    print(
        f"{path} is valid: {config.engine.first_replicas} replicas of {config.model} on {config.device}, "
        f"{trains}, at {file.url}"
    )
    return 0


def show(path: Path) -> int:
    """Print all settings, defaults included, as they would be under `args`; returns the exit status."""
    file = _read(path)
    if file is None:
        return 1
    print(yaml.safe_dump(file.config.model_dump(mode="json"), sort_keys=False), end="")
    return 0


def schema() -> int:
    """Print the JSON schema of what is under `args`; returns the exit status."""
    print(json.dumps(AppConfig.model_json_schema(), indent=2))
    return 0


def _read(path: Path) -> ServeFile | None:
    try:
        return read_serve_file(path)
    except (ConfigError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return None
