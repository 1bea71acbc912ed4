"""The prompts of one training step in one request: over all replicas, and on one of them.

    python -m benchmarks.prompt_lists                                      (a CPU, the built-in model)
    python -m benchmarks.prompt_lists --gpu 8b --prompts 128 --answers 8 --tokens 256       (two GPUs)

A session keeps a request on one replica, where every list went before lists were divided. Both are measured
in turns on the same fleet.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.servers import CPU, MODEL, Setup, fleet, gpu

ONE, ALL = "one replica", "all replicas"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", metavar="SIZE", help="random weights of this shape, see benchmarks.models")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--answers", type=int, default=2, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    with (
        fleet(8451, setup=_setup(args.gpu), replicas=args.replicas) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        print("| prompts x answers x tokens | where | seconds | tokens/s | times as fast |")
        print("|---|---|---|---|---|")
        for prompts in args.prompts:
            body = _body(prompts, args.answers, args.tokens)
            turns = [
                {where: _seconds(client, body, where) for where in (ONE, ALL)}
                for _ in range(args.repeats + 1)
            ]
            taken = {where: [turn[where] for turn in turns[1:]] for where in (ONE, ALL)}  # the first warms up
            ratios = [one / together for one, together in zip(taken[ONE], taken[ALL], strict=True)]
            for where, seconds in taken.items():
                rate = prompts * args.answers * args.tokens / statistics.median(seconds)
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                load = f"{prompts} x {args.answers} x {args.tokens}"
                shown = spread if where == ALL else ""
                cells = (load, where, f"{statistics.median(seconds):.2f}", f"{rate:.0f}", shown)
                print("| " + " | ".join(cells) + " |", flush=True)


def _setup(size: str | None) -> Setup:
    if size is None:
        # Each replica has its share of the cores, as in a fleet.
        return replace(CPU, environment={k: v for k, v in CPU.environment.items() if k != "OMP_NUM_THREADS"})
    from benchmarks.models import config_directory

    setup = gpu(config_directory(size))
    return replace(setup, engine=setup.engine | {"gpu_memory_utilization": 0.9})


def _body(prompts: int, answers: int, tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": [f"Write number {number} as a word, then tell a story." for number in range(prompts)],
        "n": answers,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _seconds(client: httpx.Client, body: dict[str, Any], where: str) -> float:
    """How long the answer to all prompts takes.

    Raises:
        RuntimeError: not every prompt was answered.
    """
    headers = {"x-session-id": "one"} if where == ONE else {}
    began = time.perf_counter()
    answer = client.post("/v1/completions", json=body, headers=headers)
    seconds = time.perf_counter() - began
    if answer.status_code != 200 or len(answer.json()["choices"]) != len(body["prompt"]) * body["n"]:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
    return seconds


if __name__ == "__main__":
    main()
