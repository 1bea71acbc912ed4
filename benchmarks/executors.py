"""An engine on a CPU as one process or, as vLLM chooses, as two: answers, and what is left to other programs.

    python -m benchmarks.executors

Starts a fleet of each kind in turn and loads it twice: alone, and beside a program that only computes.
"""

import argparse
import multiprocessing
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from benchmarks.load import Load, Measured, run
from benchmarks.servers import CPU, fleet

EXECUTORS = {"one (ours)": {}, "two (vLLM's choice)": {"distributed_executor_backend": "mp"}}


def compute(stop: Connection) -> None:
    """Compute until told to stop; answer with the share of a core that there was for it."""
    begin, used = time.monotonic(), time.process_time()
    while not stop.poll():
        sum(range(10_000))
    stop.send((time.process_time() - used) / (time.monotonic() - begin))


def beside(url: str, load: Load) -> tuple[Measured, float]:
    """The load beside a program that computes, and that program's share of a core."""
    ours, its = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=compute, args=(its,), daemon=True)
    process.start()
    measured = run(url, load)
    ours.send(None)
    return measured, float(ours.recv())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    load = Load(requests=args.requests, concurrency=args.concurrency)
    print("| processes of an engine | requests/s | longest gap (ms) | beside a program | its share |")
    print("|---|---|---|---|---|")
    for name, extra in EXECUTORS.items():
        setup = replace(CPU, engine=CPU.engine | {"extra": extra})
        with fleet(8451, setup=setup, replicas=args.replicas) as url:
            run(url, load)
            alone = [run(url, load) for _ in range(args.repeats)]
            shared = [beside(url, load) for _ in range(args.repeats)]
        rate = statistics.median(each.requests_per_s for each in alone)
        gap = statistics.median(each.longest_gap_ms for each in alone)
        beside_rate = statistics.median(each.requests_per_s for each, _ in shared)
        share = statistics.median(share for _, share in shared)
        print(f"| {name} | {rate:.2f} | {gap:.0f} | {beside_rate:.2f} | {share:.1%} of a core |", flush=True)


if __name__ == "__main__":
    main()
