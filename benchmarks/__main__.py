"""`make bench`: the benchmarks of this machine, one table each."""

import sys

import torch

from benchmarks import control_plane, serving, update_gap


def main() -> None:
    for benchmark in (control_plane, serving, update_gap):
        print(f"\n## {benchmark.__name__}\n", flush=True)
        benchmark.main()
    if torch.cuda.is_available():
        print("\nGPU benchmarks have arguments of their own: see benchmarks/RESULTS.md", file=sys.stderr)


if __name__ == "__main__":
    main()
