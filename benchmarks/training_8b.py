"""A step of an 8B model on two GPUs, beside TRL's: an adapter on one GPU each, and all weights on both.

    python -m benchmarks.models 8b /tmp/m8 --seed 0
    python -m benchmarks.training_8b /tmp/m8
    python -m benchmarks.training_8b --device cpu smollm2-135m --prompts 2 --answers 2 --prompt 16 --answer 16

Each row is a run of `benchmarks.training` with a time limit of its own, and what it says is on stderr. Where
there are two GPUs, ours and TRL's with an adapter run at the same time, each on one of them. Options that are
not listed here are passed on.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.training import HEAD

RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A variant of `benchmarks.training`; `device` is the only GPU it may use, None: two processes on two."""

    variant: str
    device: int | None
    options: Sequence[str] = ()

    def row(self, passed: Sequence[str], limit_s: float) -> str:
        """The row of the table, or why there is none."""
        command = [sys.executable, "-m"]
        environment = dict(os.environ)
        if self.device is None:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"]
        else:
            environment["CUDA_VISIBLE_DEVICES"] = str(self.device)
        command += ["benchmarks.training", *self.options, *passed, "--variants", self.variant]
        # `timeout` and not Python's own limit, which would leave the processes of the ranks behind.
        limited = ["timeout", "--kill-after=10", str(limit_s), *command]
        done = subprocess.run(limited, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {self.variant} |")]
        why = (
            f"none after {limit_s:g} s" if done.returncode in (124, 137) else f"exit status {done.returncode}"
        )
        return rows[0] if rows else f"| {self.variant} | {why} |"


def runs(device: str) -> list[list[Run]]:
    """What runs at the same time, one after the other."""
    if device == "cpu":
        return [
            [Run(variant="mixed+selective+lora", device=0)],
            [Run(variant="trl+lora", device=0)],
            [Run(variant="mixed+checkpointed+fsdp2", device=None)],
            [Run(variant="trl+fsdp2", device=None, options=("--rows", "2"))],
        ]
    adapters = [
        Run(variant="packed+compiled+selective+lora", device=0),
        Run(variant="trl+liger+lora", device=min(1, torch.cuda.device_count() - 1)),
    ]
    together = [adapters] if adapters[1].device else [[each] for each in adapters]
    # 16 bytes a weight are 61 GiB of each GPU: small micro-batches leave room for them on one of 80 GB.
    return [
        *together,
        [Run(variant="packed+compiled+checkpointed+fsdp2", device=None, options=("--budget", "5120"))],
        [Run(variant="trl+liger+fsdp2", device=None, options=("--rows", "2"))],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=130.0, help="seconds of each row")
    options, passed = parser.parse_known_args()
    print("\n".join(HEAD.splitlines()[-2:]), flush=True)
    for together in runs(options.device):
        with ThreadPoolExecutor() as pool:
            made = pool.map(
                lambda run: run.row(["--device", options.device, *passed], options.limit), together
            )
            for row in made:
                print(row, flush=True)


if __name__ == "__main__":
    main()
