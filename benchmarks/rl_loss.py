"""How many of its tokens a `make rl` run loses to updates: the run with them, and without.

python -m benchmarks.rl_loss [--steps 6] [--pairs 2] [--kv-cache keep]

The fleet of serve_config.yaml and the job's own defaults, but a learning rate that changes no weight: all
runs generate with the same weights, whose answers are equally long. Advantages are those of a batch, so that
each step learns from all of its answers: with the job's own, which leaves groups of equal rewards out, it
learns from 40 to 80 of 96 by chance, and takes as long. In the runs without updates the trainer takes every
step and publishes nothing. The first step of each run is left out: it waits for answers.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import yaml
from pydantic import JsonValue

from app.client import calls
from app.client.connection import AsyncFleetClient
from app.client.program_options import parse
from app.jobs import grpo, metrics
from app.jobs.options import JobOptions
from benchmarks.servers import running
from trainers.estimators import AdvantageEstimator

PORT = 8451
NO_LEARNING = 1e-30  # changes no weight in float32; 0 is refused
SERVE_CONFIG = Path(__file__).parent.parent / "serve_config.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run; all but the tokens per second in seconds, medians of its steps."""

    tokens_per_s: float
    step_s: float
    wait_s: float
    publish_s: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument(
        "--kv-cache", choices=("keep", "recompute"), help="default: as serve_config.yaml says"
    )
    args = parser.parse_args(arguments)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as root:
        config = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))
        config["http_options"]["port"] = PORT
        [application] = config["applications"]
        application["args"]["state_dir"] = f"{root}/state"
        application["args"]["trainer"]["optimizer"]["learning_rate"] = NO_LEARNING
        if args.kv_cache is not None:
            application["args"]["weights"]["kv_cache"] = args.kv_cache
        replicas = application["args"]["engine"]["num_replicas"]
        with running(config, Path(root), replicas=replicas, trainer=True) as url:
            print("| updates | tokens/s | step (s) | waits for answers (s) | publish (s) |")
            print("|---|---|---|---|---|", flush=True)
            for number in range(2 * args.pairs):
                updates = number % 2 == 0
                row = _run(url, Path(root) / f"run-{number}.jsonl", args.steps, updates=updates)
                rates[updates].append(row.tokens_per_s)
                print(
                    f"| {'yes' if updates else 'no'} | {row.tokens_per_s:.1f} | {row.step_s:.1f} "
                    f"| {row.wait_s:.1f} | {row.publish_s:.1f} |",
                    flush=True,
                )
    lost = 1 - statistics.mean(rates[True]) / statistics.mean(rates[False])
    print(f"lost to updates: {lost:.1%} of the tokens")


def _run(url: str, path: Path, steps: int, *, updates: bool) -> Row:
    """One run of the job on a fleet that is up."""
    asked = ["--url", url, "--metrics", str(path), "--advantage", AdvantageEstimator.REINFORCE_PP]
    options = replace(parse(JobOptions, asked), steps=steps)
    if updates:
        asyncio.run(grpo.main(options, time.monotonic()))
    else:
        with patch("app.jobs.training.publish", _publish_nothing):
            asyncio.run(grpo.main(options, time.monotonic()))
    records = metrics.records(path)[1:]
    seconds = sum(each.step_s for each in records)
    return Row(
        tokens_per_s=sum(each.tokens_per_s * each.step_s for each in records) / seconds,
        step_s=statistics.median(each.step_s for each in records),
        wait_s=statistics.median(each.wait_s for each in records),
        publish_s=statistics.median(each.publish_s for each in records),
    )


async def _publish_nothing(client: AsyncFleetClient, label: str, metrics: Mapping[str, JsonValue]) -> int:
    return (await client.send(calls.health())).weight_version


if __name__ == "__main__":
    main()
