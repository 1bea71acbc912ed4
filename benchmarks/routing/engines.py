"""Prefix hits of real engines, by their own counters, under trajectories whose prompts begin alike.

    python -m benchmarks.routing.engines                                 (a CPU, the built-in model)
    python -m benchmarks.routing.engines --gpu 8b --groups 32 --prompt 2000 --tokens 200 --at-once 128

The second one needs two GPUs. The same fleet answers in turns: by load, where the router cannot find the
prompt because its name in the body is escaped; by prefix; and with a session for each trajectory. Each time
all prompts are new.
"""

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.servers import CPU, MODEL, Setup, fleet, gpu

LOAD, PREFIX, SESSION = "load (the prompt is hidden)", "prefix", "session"
COUNTERS = ("queries", "hits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step: groups of trajectories on one prompt, in tokens."""

    groups: int
    answers: int
    prompt: int
    turns: int
    tokens: int  # of each answer
    observation: int  # after each
    at_once: int
    think_s: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", metavar="SIZE", help="random weights of this shape, see benchmarks.models")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--answers", type=int, default=4, help="trajectories of a group")
    parser.add_argument("--prompt", type=int, default=300, help="tokens that a group has in common")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--observation", type=int, default=250, help="tokens that follow an answer")
    parser.add_argument("--at-once", type=int, default=8, help="trajectories")
    parser.add_argument("--think-s", type=float, default=1.0, help="mean pause after a turn")
    args = parser.parse_args(arguments)
    names = ("groups", "answers", "prompt", "turns", "tokens", "observation", "at_once", "think_s")
    shape = Shape(**{name: getattr(args, name) for name in names})
    with (
        fleet(8461, setup=_setup(args.gpu), replicas=args.replicas) as url,
        httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client,
    ):
        print("| chosen by | prompt tokens | found in a cache | trajectory, mean (s) | last answer (s) |")
        print("|---|---|---|---|---|")
        for seed, chosen_by in enumerate((LOAD, PREFIX, SESSION)):
            _step(client, replace(shape, groups=1), chosen_by, seed=100 + seed)  # warms up
            before = _counters(client)
            began = time.perf_counter()
            latencies = _step(client, shape, chosen_by, seed)
            lasted = time.perf_counter() - began
            queried, hits = (after - old for after, old in zip(_counters(client), before, strict=True))
            cells = (
                chosen_by,
                f"{queried:,.0f}",
                f"{100 * hits / queried:.0f} %",
                f"{statistics.mean(latencies):.2f}",
                f"{lasted:.1f}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


def _setup(size: str | None) -> Setup:
    if size is None:
        # Each replica has its share of the cores, as in a fleet.
        return replace(CPU, environment={k: v for k, v in CPU.environment.items() if k != "OMP_NUM_THREADS"})
    from benchmarks.models import config_directory

    setup = gpu(config_directory(size))
    return replace(setup, engine=setup.engine | {"gpu_memory_utilization": 0.9, "max_model_len": 8192})


def _step(client: httpx.Client, shape: Shape, chosen_by: str, seed: int) -> list[float]:
    """The seconds that each trajectory took."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 40_000) for _ in range(shape.prompt)] for _ in range(shape.groups)]
    asked = [(f"{seed}-{n}-{i}", p) for n, p in enumerate(prompts) for i in range(shape.answers)]

    def run(named: tuple[str, list[int]]) -> float:
        name, context = named[0], list(named[1])
        own = random.Random(name)
        began = time.perf_counter()
        for _ in range(shape.turns):
            # Without a pause, of two replicas the one that has just answered is the less loaded one.
            time.sleep(own.expovariate(1 / shape.think_s))
            context += _answer(client, context, shape.tokens, chosen_by, name)
            context += [own.randrange(100, 40_000) for _ in range(shape.observation)]
        return time.perf_counter() - began

    with ThreadPoolExecutor(shape.at_once) as threads:
        return list(threads.map(run, asked))


def _answer(client: httpx.Client, context: list[int], tokens: int, chosen_by: str, name: str) -> list[int]:
    """The token ids of one answer.

    Raises:
        HTTPStatusError: there is none.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": context,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "return_token_ids": True,
    }
    content = json.dumps(body)
    if chosen_by == LOAD:
        content = content.replace('"prompt"', '"\\u0070rompt"')
    headers = {"content-type": "application/json"}
    if chosen_by == SESSION:
        headers["x-session-id"] = name
    answer = client.post("/v1/completions", content=content, headers=headers).raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def _counters(client: httpx.Client) -> list[float]:
    """Tokens that prompts had in all replicas, and those that were found in a prefix cache."""
    families = {each.name: each for each in text_string_to_metric_families(client.get("/metrics").text)}
    return [
        sum(
            each.value
            for each in families[f"vllm:prefix_cache_{name}"].samples
            if each.name.endswith("_total")
        )
        for name in COUNTERS
    ]


if __name__ == "__main__":
    main()
