"""The run's record: one JSON line a step, written as it happens, read by `--resume`."""

import json
import time
from pathlib import Path
from typing import Any

RUNS = Path("~/.cache/slipstream/runs")


def new_metrics_file() -> Path:
    return RUNS.expanduser() / f"grpo-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"


def newest_metrics_file() -> Path:
    """Raises ValueError if there is none."""
    files = sorted(RUNS.expanduser().glob("grpo-*.jsonl"))
    if not files:
        raise ValueError(f"--resume finds no run in {RUNS}: name the file with --metrics")
    return files[-1]


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    """Every complete line; the last one may be half a line if the job was killed while it wrote.

    Raises:
        ValueError: a line before the last is not JSON, or the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"the metrics file {path} cannot be read: {error}") from error
    read = []
    for number, line in enumerate(lines, start=1):
        try:
            read.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} must be JSON: {error}") from error
    return read
