"""How fast a version is staged on an idle engine, by chunk size; vLLM's native engine as the peer.

    python -m benchmarks.stage_rate --size 1.7b --transport ipc --chunk-mb 256 512 1024      (1 GPU)
    python -m benchmarks.stage_rate --size 30b-a3b --transport nccl --memory 0.95            (2 GPUs)

The limit is measured in the same run: a copy of the same bytes on the device (ipc) or over the link (nccl).
Over ipc a replica reads the trainer's own tensors. Those that are cast (`--trainer-dtype float32`) or summed
with an adapter (`--adapter RANK`, as `trainer.lora.publish: merged` does) are copied twice, into a buffer and
out of it.
"""

import argparse
import asyncio
import os
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = ("engine", "chunk (MiB)", "staged (ms)", "GB/s", "of the limit", "commit (ms)", "round (ms)")


async def measure(arguments: argparse.Namespace) -> None:
    from benchmarks.limits import copy_rate
    from benchmarks.trainer_process import TrainerProcess

    first = arguments.gpu + (arguments.transport == "nccl")
    limit = copy_rate(arguments.gpu, first)
    trainer = TrainerProcess(
        arguments.size, 0, gpu=arguments.gpu, dtype=arguments.trainer_dtype, adapter=arguments.adapter
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + i) for i in range(arguments.tp))
    print(
        f"{arguments.size} from {arguments.trainer_dtype}, {trainer.size_bytes / 1e9:.2f} GB, "
        f"{f'adapter of rank {arguments.adapter}, ' * bool(arguments.adapter)}"
        f"{arguments.transport}, TP {arguments.tp}; limit: {limit / 1e9:.0f} GB/s"
    )
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for mode in arguments.modes:
        await measure_mode(arguments, mode, trainer, limit)
    trainer.stop()


async def measure_mode(arguments: argparse.Namespace, mode: str, trainer: Any, limit: float) -> None:
    from benchmarks.weight_sync import Native, Ours, start_engine

    backend = f"slipstream_{arguments.transport}" if mode == "ours" else arguments.transport
    engine = await start_engine(
        str(arguments.model),
        backend,
        "device" if mode == "ours" else "none",
        load_format="dummy",
        enforce_eager=True,
        gpu_memory_utilization=arguments.memory,
        kv_cache_memory_bytes=2 << 30,
        tensor_parallel_size=arguments.tp,
    )
    link: Any = Ours(engine) if mode == "ours" else Native(engine)
    for chunk_mb in arguments.chunk_mb if mode == "ours" else [0]:
        await trainer.connect(link, backend, arguments.tp, chunk_bytes=(chunk_mb << 20) or None)
        found = []
        for _ in range(arguments.rounds + 2):  # the first one is loaded by vLLM and recorded
            seconds = await trainer.send(link)
            times = link.times
            found.append((times.staged - times.begin, times.live - times.staged, seconds))
        staged, commit, total = (median(column) for column in zip(*found[2:], strict=True))
        rate = trainer.size_bytes / staged
        print(
            f"| {mode} | {chunk_mb or ''} | {1e3 * staged:.0f} | {rate / 1e9:.0f} | {rate / limit:.0%} "
            f"| {1e3 * commit:.1f} | {1e3 * total:.0f} |",
            flush=True,
        )
    if mode == "ours":
        print(
            f"chunks that are loaded by a recorded plan: {await engine.workers('staging_plans')}", flush=True
        )
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="1.7b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/slipstream-models"))
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk-mb", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--trainer-dtype", default="bfloat16", help="of its parameters; sent in bfloat16")
    parser.add_argument("--adapter", type=int, default=0, metavar="RANK", help="train one, send its sum")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=["ours", "native"])
    parser.add_argument("--memory", type=float, default=0.45, help="gpu_memory_utilization of the engine")
    parser.add_argument("--gpu", type=int, default=0, help="the trainer's; over nccl the engine's come after")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    from benchmarks.models import config_directory

    arguments.model = config_directory(arguments.size, arguments.model)
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
