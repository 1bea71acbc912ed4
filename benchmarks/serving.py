"""Throughput and time to first token through Slipstream, against `vllm serve` with the same engine.

python -m benchmarks.serving [--requests 64] [--concurrency 16] [--repeats 3]

Both servers are up at the same time and loaded in turns, so that both meet the same machine.
"""

import argparse
import asyncio
import os
import statistics

from benchmarks.load import Felt, Load, run
from benchmarks.servers import fleet, vllm_serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    load = Load(requests=args.requests, concurrency=args.concurrency)
    single = Load(requests=12, concurrency=1)
    warm = Load(requests=args.concurrency, concurrency=args.concurrency)
    felt: dict[str, list[Felt]] = {"vllm serve": [], "slipstream": []}
    alone: dict[str, list[Felt]] = {"vllm serve": [], "slipstream": []}
    with fleet(8431) as ours, vllm_serve(8441, threads=os.cpu_count() or 1) as peer:
        for url in (peer, ours):
            asyncio.run(run(url, warm))
        for _ in range(args.repeats):
            for name, url in (("vllm serve", peer), ("slipstream", ours)):
                felt[name].append(asyncio.run(run(url, load)))
                alone[name].append(asyncio.run(run(url, single)))
    print(f"| {load.concurrency} concurrent streams | requests/s | tokens/s | first token, median | alone |")
    print("|---|---|---|---|---|")
    for name, runs in felt.items():
        rate, tokens, first = _medians(runs)
        print(f"| {name} | {rate:.2f} | {tokens:.0f} | {first:.0f} ms | {_medians(alone[name])[2]:.1f} ms |")
    ratio = _medians(felt["slipstream"])[0] / _medians(felt["vllm serve"])[0]
    more = _medians(alone["slipstream"])[2] - _medians(alone["vllm serve"])[2]
    print(f"\nthroughput ratio {ratio:.3f}; first token of a single stream: {more:+.1f} ms")


def _medians(runs: list[Felt]) -> tuple[float, float, float]:
    return (
        statistics.median(run.requests_per_s for run in runs),
        statistics.median(run.tokens_per_s for run in runs),
        statistics.median(run.first_token_ms for run in runs),
    )


if __name__ == "__main__":
    main()
