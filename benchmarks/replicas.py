"""How long a round takes with 1, 2 and 3 replicas over NCCL: one broadcast should reach all in the same time.

python -m benchmarks.replicas --size 8b --replicas 1 2 3      (trainer on GPU 0, a replica on each next one)

Beside it vLLM's own engines, which load inside a pause.
"""

import argparse
import asyncio
import os
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = (
    "replicas",
    "staged (ms)",
    "commit (ms)",
    "round (ms)",
    "smallest and largest round",
    "relative to one",
)


class ReplicaGroup:
    """The first `count` replicas behind one weight-sync client; stands in for the controller."""

    def __init__(self, links: list[Any], count: int) -> None:
        self._links = links[:count]

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        await asyncio.gather(
            *(
                link.init_weight_transfer_engine({**info, "rank_offset": 1 + index})
                for index, link in enumerate(self._links)
            )
        )

    async def start_weight_update(self) -> None:
        await asyncio.gather(*(link.start_weight_update() for link in self._links))

    async def update_weights(self, payload: Any) -> None:
        await asyncio.gather(*(link.update_weights(payload) for link in self._links))

    async def finish_weight_update(self) -> None:
        await asyncio.gather(*(link.finish_weight_update() for link in self._links))

    def staged_s(self) -> float:
        return float(max(link.times.staged - link.times.begin for link in self._links))

    def commit_s(self) -> float:
        return float(max(link.times.live - link.times.staged for link in self._links))


async def measure(arguments: argparse.Namespace, mode: str) -> None:
    """Rounds of one kind of engine, with each number of replicas; rows of the table."""
    from benchmarks.trainer_process import TrainerProcess
    from benchmarks.weight_sync import Native, Ours, start_engine

    trainer = TrainerProcess(arguments.size, 0, gpu=arguments.gpu)
    native = mode == "native"
    backend = "nccl" if native else "slipstream_nccl"
    links: list[Any] = []
    for index in range(max(arguments.replicas)):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(arguments.gpu + 1 + index)
        engine = await start_engine(
            str(arguments.model),
            backend,
            "none" if native else "device",
            load_format="dummy",
            enforce_eager=True,
            kv_cache_memory_bytes=2 << 30,
        )
        links.append(Native(engine) if native else Ours(engine))
    print(f"\n{arguments.size}, {trainer.size_bytes / 1e9:.2f} GB, nccl, one GPU for each replica, {mode}")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    single = 0.0
    for count in arguments.replicas:
        group = ReplicaGroup(links, count)
        await trainer.connect(group, backend, count)
        found = []
        for _ in range(arguments.rounds + 2):  # the first one is loaded by vLLM and recorded
            seconds = await trainer.send(group)
            found.append((group.staged_s(), group.commit_s(), seconds))
        staged, commit, total = zip(*found[2:], strict=True)
        single = single or median(total)
        cells = [f"{count}", f"{1e3 * median(staged):.0f}", f"{1e3 * median(commit):.1f}"]
        cells += [f"{1e3 * median(total):.0f}", f"{1e3 * min(total):.0f} to {1e3 * max(total):.0f}"]
        print("| " + " | ".join([*cells, f"{median(total) / single:.2f}"]) + " |", flush=True)
    trainer.stop()
    for link in links:
        await link.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/slipstream-models"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", default=["ours", "native"], choices=["ours", "native"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", type=int, default=0, help="the trainer's; the replicas' come after it")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    from benchmarks.models import config_directory

    arguments.model = config_directory(arguments.size, arguments.model)
    for mode in arguments.modes:
        asyncio.run(measure(arguments, mode))


if __name__ == "__main__":
    main()
