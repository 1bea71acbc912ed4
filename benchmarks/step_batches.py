"""How long a batch of a step takes from a program to the trainer that has checked it, in each form.

    python -m benchmarks.step_batches --answers 4000 --tokens 512

One fleet, and nothing is trained: the last token of each batch is outside of the vocabulary, so the trainer
reads and checks everything, refuses the batch and changes nothing. Three forms, each `--repeat` times, and
the longest wait of `GET /fleet` meanwhile, which shares the router's process:

    json      POST /train/step, the objects of `docs/guides/losses.md`
    arrays    POST /train/step with `application/x-safetensors`, as the RL job sends it
    handle    the same bytes through a handle of the deployment, from a job in the cluster
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial

import httpx
import ray
from ray import serve

from benchmarks.servers import fleet
from trainers.trajectory import Trajectory
from trainers.trajectory_arrays import MEDIA_TYPE, to_bytes

OUTSIDE = 1_000_000  # of every vocabulary
TIMEOUT_S = 300.0
PAUSE_S = 0.02


def batch(answers: int, tokens: int) -> list[Trajectory]:
    generator = random.Random(0)
    made = [
        Trajectory(
            prompt_token_ids=tuple(generator.randrange(1000) for _ in range(64)),
            token_ids=tuple(generator.randrange(1000) for _ in range(tokens)),
            logprobs=tuple(-generator.random() for _ in range(tokens)),
            advantage=generator.gauss(0, 1),
        )
        for _ in range(answers)
    ]
    made[-1] = replace(made[-1], token_ids=(*made[-1].token_ids[:-1], OUTSIDE))
    return made


class Others:
    """Calls of somebody else meanwhile; `longest_s` is the longest wait."""

    def __init__(self, url: str) -> None:
        self.longest_s = 0.0
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Others":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._end.wait(PAUSE_S):
                began = time.perf_counter()
                client.get(f"{self._url}/fleet").raise_for_status()
                self.longest_s = max(self.longest_s, time.perf_counter() - began)


def measure(name: str, url: str, made: list[Trajectory], repeat: int) -> None:
    """Print the row of one form."""
    write, send = as_arrays, by_handle
    if name != "handle":
        client = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        send = partial(post, client, "application/json" if name == "json" else MEDIA_TYPE)
        write = as_json if name == "json" else as_arrays
    wrote, sent, waits = [], [], []
    for _ in range(repeat):
        began = time.perf_counter()
        content = write(made)
        wrote.append(time.perf_counter() - began)
        with Others(url) as others:
            began = time.perf_counter()
            said = send(content)
            sent.append(time.perf_counter() - began)
        assert "token ids must lie in" in said, said[:300]
        waits.append(others.longest_s)
    print(
        f"| {name} | {len(content) / 1e6:.0f} | {statistics.median(wrote):.2f} | "
        f"{statistics.median(sent):.2f} | {max(waits):.2f} |",
        flush=True,
    )


def as_json(made: list[Trajectory]) -> bytes:
    return json.dumps({"trajectories": [asdict(each) for each in made]}).encode()


def as_arrays(made: list[Trajectory]) -> bytes:
    return to_bytes(made)


def post(client: httpx.Client, media_type: str, content: bytes) -> str:
    return client.post("/train/step", content=content, headers={"content-type": media_type}).text


def by_handle(content: bytes) -> str:
    if not ray.is_initialized():
        ray.init(configure_logging=False)
    trainer = serve.get_deployment_handle("trainer", app_name="slipstream")
    try:
        return str(trainer.step.remote(content).result(timeout_s=TIMEOUT_S))
    except Exception as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=9780)
    parser.add_argument("--url", help="measure the handle, in a job of this fleet's cluster")
    options = parser.parse_args()
    made = batch(options.answers, options.tokens)
    if options.url is not None:
        measure("handle", options.url, made, options.repeat)
        return
    print(f"{options.answers} answers of {options.tokens} tokens to prompts of 64\n")
    print("| form | size (MB) | write (s) | send and check (s) | longest wait of others (s) |")
    print("|---|---|---|---|---|", flush=True)
    with fleet(options.port, trainer=True, router={"max_body_bytes": 1 << 30}) as url:
        for name in ("json", "arrays"):
            measure(name, url, made, options.repeat)
        sizes = ["--answers", options.answers, "--tokens", options.tokens, "--repeat", options.repeat]
        job = [sys.executable, "-m", "benchmarks.step_batches", "--url", url, *map(str, sizes)]
        dashboard = f"http://127.0.0.1:{options.port + 1}"
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", dashboard, "--"]
        output = subprocess.run(
            [*submit, *job], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        ).stdout
        print(next((line for line in output.splitlines() if line.startswith("| handle")), output))


if __name__ == "__main__":
    main()
