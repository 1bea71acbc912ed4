"""Rounds back to back under load, and whether anything grows: memory, open files, threads, shared memory.

    python -m benchmarks.soak --rounds 500
    python -m benchmarks.soak --config app/layouts/ipc.yaml --model Qwen/Qwen3-1.7B --rounds 500 --streams 16

Starts the fleet of a Serve config as `slipstream serve` does, with its state in a directory of its own.
Its trainer publishes, after an optimizer step before each n-th round (`--step-every`), while streams run.
Prints the time of rounds, the streams, and one line for each figure that was sampled; exits with 1 if a
stream was bad or a figure is not flat.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.client import calls
from app.client.completions import complete
from app.client.connection import FleetClient, FleetError
from benchmarks.process_samples import MARK, Growth, Sampler, growth
from benchmarks.servers import running

DEFAULT = Path(__file__).parents[1] / "serve_config.yaml"
SAMPLES = 60
PROMPT = [5, 6, 7, 8, 9]


def configured(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """The Serve config of the run: that of the file, with a state and a port of its own."""
    document: dict[str, Any] = yaml.safe_load(options.config.read_text())
    document["http_options"] = {**document.get("http_options", {}), "host": "127.0.0.1", "port": options.port}
    (application,) = document["applications"]
    args = application["args"]
    args["state_dir"] = str(root / "state")
    if options.model is not None:
        args["model"] = options.model
    if options.load_format is not None:
        extra = args.setdefault("engine", {}).setdefault("extra", {})
        extra["load_format"] = options.load_format
    if "trainer" not in args:
        raise SystemExit(f"{options.config}: expected a fleet with a trainer, which publishes")
    return document


def rounds(url: str, options: argparse.Namespace, sampler: Sampler) -> list[float]:
    """Make the rounds; how long each took (s)."""
    took = []
    every = max(1, options.rounds // SAMPLES)
    with FleetClient.connect(url, timeout_s=600) as fleet:
        model = fleet.send(calls.model())
        for number in range(options.rounds):
            if options.step_every and number % options.step_every == 0:
                _step(fleet, model)
            began = time.perf_counter()
            fleet.send(calls.publish())
            took.append(time.perf_counter() - began)
            if number % every == 0:
                sampler.sample(number)
                print(f"round {number}: {took[-1]:.2f} s", file=sys.stderr, flush=True)
            if time.monotonic() > options.deadline:
                break
        sampler.sample(len(took))
    return took


def _step(fleet: FleetClient, model: str) -> None:
    """One optimizer step on four sampled answers."""
    options: dict[str, Any] = {"temperature": 1.0, "logprobs": 1}
    answers = [fleet.send(complete(model, PROMPT, 16, seed=seed, **options)).answer for seed in range(4)]
    batch = [
        answer.trajectory(PROMPT, advantage=1.0 if index % 2 else -1.0)
        for index, answer in enumerate(answers)
        if not answer.aborted
    ]
    fleet.send(calls.step(batch))


def load(url: str, file: Path, streams: int) -> subprocess.Popen[bytes]:
    """The streams, in a process of their own; it ends with its input."""
    command = [sys.executable, "-m", "benchmarks.soak_load", url, str(file), str(streams)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def report(took: list[float], streams: dict[str, int], found: list[Growth]) -> bool:
    """Print what was measured; whether nothing was bad and all is flat."""
    ordered = sorted(took)
    print(
        f"\n{len(took)} rounds: the first {took[0]:.2f} s, median {statistics.median(took):.2f} s, ", end=""
    )
    print(f"99 % within {ordered[int(0.99 * (len(took) - 1))]:.2f} s, longest {ordered[-1]:.2f} s")
    print(f"streams: {streams['whole']} whole, {streams['bad']} bad, {streams['refused']} refused (503)\n")
    print(
        "| process | figure | after warm-up | at the end | per 100 rounds | flat |\n|---|---|---|---|---|---|"
    )
    for each in sorted(found, key=lambda item: (item.flat, item.title, item.pid, item.figure)):
        print(
            f"| {each.title} {each.pid or ''} | {each.figure} | {each.first:.1f} | {each.last:.1f} "
            f"| {each.slope:+.2f} | {'yes' if each.flat else '**no**'} |"
        )
    growing = [each for each in found if not each.flat]
    print(f"\nverdict: {len(found) - len(growing)} of {len(found)} figures are flat")
    return not growing and streams["bad"] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=DEFAULT)
    parser.add_argument("--model", help="instead of the config's")
    parser.add_argument("--load-format", help="of the engines, for example dummy")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-every", type=int, default=1, help="rounds; 0: publish only")
    parser.add_argument("--minutes", type=float, default=1e6, help="end earlier than after all rounds")
    parser.add_argument("--port", type=int, default=9720)
    parser.add_argument("--samples", type=Path, help="file for every sample, as JSON lines")
    options = parser.parse_args()
    options.deadline = time.monotonic() + 60 * options.minutes
    os.environ[MARK] = mark = uuid.uuid4().hex
    sampler = Sampler(mark)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        document, seen = configured(options, root), root / "streams.json"
        replicas = document["applications"][0]["args"].get("engine", {}).get("num_replicas", 2)
        with running(document, root, replicas=replicas, trainer=True) as url:
            streaming = load(url, seen, options.streams)
            try:
                took = rounds(url, options, sampler)
            except (FleetError, httpx.HTTPError) as error:
                raise SystemExit(f"a round failed: {error}") from error
            finally:
                assert streaming.stdin is not None
                streaming.stdin.close()
                streaming.wait(120)
            good = report(took, json.loads(seen.read_text()), growth(sampler.samples))
    if options.samples is not None:
        options.samples.write_text("".join(json.dumps(asdict(each)) + "\n" for each in sampler.samples))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
