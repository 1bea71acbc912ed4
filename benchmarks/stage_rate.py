"""How fast a version is staged on an idle engine, by chunk size; vLLM's native engine as the peer.

python -m benchmarks.stage_rate --size 1.7b --transport ipc --chunk-mb 256 512 1024
"""

import argparse
import asyncio
import os
from pathlib import Path
from statistics import median
from typing import Any


async def measure(arguments: argparse.Namespace) -> None:
    from benchmarks.weight_sync import Native, Ours, TrainerProcess, start_engine

    trainer = TrainerProcess(arguments.size, 0, gpu=0)
    if arguments.transport == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(1 + i) for i in range(arguments.tp))
    rows = []
    for mode in ("ours", "native"):
        backend = f"slipstream_{arguments.transport}" if mode == "ours" else arguments.transport
        engine = await start_engine(
            str(arguments.model),
            backend,
            "device" if mode == "ours" else "none",
            load_format="dummy",
            enforce_eager=True,
            gpu_memory_utilization=0.45,
            tensor_parallel_size=arguments.tp,
        )
        link: Any = Ours(engine) if mode == "ours" else Native(engine)
        for chunk_mb in arguments.chunk_mb if mode == "ours" else [0]:
            options: dict[str, Any] = {"chunk_bytes": chunk_mb << 20} if chunk_mb else {}
            await trainer.connect(link, backend, arguments.tp, **options)
            found = []
            for _ in range(arguments.rounds + 2):
                await trainer.send(link)
                times = link.times
                stage_s = times.verified.get("stage_s", times.staged - times.begin)
                verify_s = times.verified.get("verify_s", 0.0)
                found.append((times.staged - times.begin, stage_s, verify_s, times.live - times.staged))
            staged, stage_s, verify_s, commit = (median(column) for column in zip(*found[2:], strict=True))
            rate = trainer.size_bytes / staged / 1e9
            rows.append(
                f"| {mode} | {chunk_mb or 'default'} | {1e3 * staged:.0f} | {rate:.0f} | "
                f"{1e3 * stage_s:.0f} | {1e3 * verify_s:.1f} | {1e3 * commit:.1f} |"
            )
        await engine.stop()
    trainer.stop()
    print(f"{arguments.size}, {trainer.size_bytes / 1e9:.2f} GB, {arguments.transport}, TP {arguments.tp}")
    print(
        "| engine | chunk (MiB) | begin to staged (ms) | GB/s | on the thread (ms) | digest launches (ms) "
        "| commit (ms) |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="1.7b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/slipstream-models"))
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk-mb", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    arguments.model = arguments.model / f"{arguments.size}-config"
    arguments.model.mkdir(parents=True, exist_ok=True)
    from benchmarks.models import write_config

    write_config(arguments.size, arguments.model)
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
