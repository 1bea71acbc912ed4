"""Throughput and time to first token through Slipstream, against `vllm serve` with the same engine.

    python -m benchmarks.serving                                      (a CPU, the built-in model)
    python -m benchmarks.serving --gpu 8b --concurrency 16 256 --processes 4 --routers 4         (one GPU)

Both servers are up at the same time and loaded in turns, so that both run under the same conditions.
"""

import argparse
import statistics

from benchmarks.load import Load, Measured, run
from benchmarks.servers import CPU, Setup, fleet, gpu, vllm_serve

FLEET, PEER = "slipstream", "vllm serve"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpu", metavar="SIZE", help="random weights of this shape, see benchmarks.models")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16])
    parser.add_argument("--requests", type=int, default=0, help="0: four for each concurrent one")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="of the client")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="also answers that are not streamed")
    args = parser.parse_args(arguments)
    setup = CPU if args.gpu is None else _gpu_setup(args.gpu)
    loads = [
        Load(
            requests=args.requests or 4 * count,
            concurrency=count,
            max_tokens=args.tokens,
            stream=stream,
            processes=args.processes if count % args.processes == 0 else 1,
        )
        for count in args.concurrency
        for stream in ([True, False] if args.plain else [True])
    ]
    alone = Load(requests=30, concurrency=1, max_tokens=4)
    with (
        fleet(8431, setup=setup, router={"num_replicas": args.routers}) as ours,
        vllm_serve(8441, setup=setup) as peer,
    ):
        urls = {PEER: peer, FLEET: ours}
        for url in urls.values():
            run(url, loads[0])
        print("| load | server | requests/s | tokens/s | first token, median (ms) | ratio |")
        print("|---|---|---|---|---|---|")
        for load in [*loads, alone]:
            _compare(urls, load, args.repeats)


def _gpu_setup(size: str) -> Setup:
    from benchmarks.models import config_directory

    return gpu(config_directory(size))


def _compare(urls: dict[str, str], load: Load, repeats: int) -> None:
    measured: dict[str, list[Measured]] = {name: [] for name in urls}
    for _ in range(repeats):
        for name, url in urls.items():
            measured[name].append(run(url, load))
    title = f"{load.concurrency} {'streams' if load.stream else 'plain'}, {load.max_tokens} tokens"
    ratios = [
        a.requests_per_s / b.requests_per_s for a, b in zip(measured[FLEET], measured[PEER], strict=True)
    ]
    for name, runs in measured.items():
        rate = statistics.median(run.requests_per_s for run in runs)
        tokens = statistics.median(run.tokens_per_s for run in runs)
        first = statistics.median(run.first_token_ms for run in runs)
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        shown = ratio if name == FLEET else ""
        print(f"| {title} | {name} | {rate:.2f} | {tokens:.0f} | {first:.1f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
