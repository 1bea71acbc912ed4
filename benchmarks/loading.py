"""What each rank of a sharded trainer has in host memory while it reads a model, and how long that takes.

    python -m benchmarks.models 0.6b /tmp/m06 --seed 0 --device cpu
    python -m benchmarks.loading /tmp/m06
    python -m benchmarks.loading /tmp/m8 --device cuda --ranks 2

Two ways, each in processes of its own: *whole*, an ordinary load of the model in every process, as without
FSDP2, and *shards*, the trainer's. The peak is that of the process (VmHWM) less what it had before, pages of
the checkpoint that are mapped included. The checkpoint must not be in float32: on a CPU an ordinary load maps
it then, and reads nothing.
"""

import argparse
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from app.settings.models import resolve_model
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.trained_policy import TrainedPolicy

WAYS = ("whole", "shards")


def memory(figure: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    match = re.search(rf"^{figure}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def rank_loads(rank: int, way: str, options: argparse.Namespace, port: int, results: Any) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=options.ranks)
    mesh = mesh_of_all_ranks(options.device)
    before = memory("VmRSS")
    began = time.perf_counter()
    device = f"cuda:{rank}" if options.device == "cuda" else "cpu"
    TrainedPolicy.load(options.model, device=device, mesh=mesh if way == "shards" else None)
    seconds = time.perf_counter() - began
    results.put((rank, memory("VmHWM") - before, seconds))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a built-in model, or a directory")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    options.model = Path(resolve_model(options.model))
    print("| way | peak of each rank (MiB) | slowest (s) |\n|---|---|---|", flush=True)
    for way in WAYS:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_loads, args=(way, options, free_port(), results), nprocs=options.ranks)
        made = sorted(results.get() for _ in range(options.ranks))
        peaks = ", ".join(f"{peak / 2**20:.0f}" for _, peak, _ in made)
        print(f"| {way} | {peaks} | {max(seconds for *_, seconds in made):.1f} |", flush=True)


if __name__ == "__main__":
    main()
