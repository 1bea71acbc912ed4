"""Models that many tests want, in files."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Save = Callable[..., Path]


def made_once(save: Save) -> Save:
    """`save(directory, ...)` writes the same files for the same arguments: a process computes them once."""
    made: dict[str, dict[str, bytes]] = {}

    @wraps(save)
    def saved(directory: Path, *args: Any, **options: Any) -> Path:
        key = repr((args, sorted(options.items())))
        if key not in made:
            with TemporaryDirectory() as path:
                save(Path(path), *args, **options)
                made[key] = {each.name: each.read_bytes() for each in Path(path).iterdir()}
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in made[key].items():
            (directory / name).write_bytes(content)
        torch.manual_seed(0)  # what a test draws next does not depend on the tests before it
        return directory

    return saved
