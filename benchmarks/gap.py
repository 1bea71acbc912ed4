"""The longest time for which a stream receives no token because of an update, and what the update costs.

    python -m benchmarks.gap --size 8b --transport ipc --streams 16 64
    python -m benchmarks.gap --size 8b --transport nccl --tp 2 --streams 16      (trainer on GPU 0)
    python -m benchmarks.gap --size 8b --transport nccl --modes ours --keep device --changed 0.03
    python -m benchmarks.gap --size 30b-a3b --transport nccl --dp 2 --one-engine --kv-gib 4

Slipstream ("ours": staged while decoding, then committed by `ReplicaEngine.commit`; "wire": the same, sent by
vLLM's own trainer engine; "drafter": ours with an EAGLE-3 head that drafts and is published with the model)
against vLLM's native transfer engine inside a pause: engines on the same GPUs, measured one after the other
while the others are idle. Prints one table; `--out` writes the token times of one update of each, for a
picture. vLLM's wire, staged, with native beside it:

    python -m benchmarks.gap --size 8b --transport ipc --modes wire native --share 0.1 1
    python -m benchmarks.gap --size 8b --transport nccl --modes wire native --packed --buffers 2

All weights are random: of what a drafter proposes, next to nothing is accepted.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import swap_times
from benchmarks.gap_figures import print_table, round_figures, tokens_between
from deployments.protocol.poll import KvCache
from deployments.weights.transports.registry import KeepPublished

LEAD_S = 1.2
SPACING_S = 0.8
MODES = ("ours", "drafter", "wire", "native")
OURS = ("ours", "drafter")
DRAFTED = 3  # tokens of one step


async def streams(engine: Any, count: int, tokens: int, arrivals: list[list[float]]) -> None:
    """Run `count` requests; `arrivals[i]` gets the arrival time of every token of stream i."""
    from vllm import SamplingParams

    async def one(index: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompt = {"prompt_token_ids": [5 + index, 6, 7]}
        before = 0
        async for output in engine.llm.generate(prompt, params, request_id=f"{time.time()}-{index}"):
            now, total = time.perf_counter(), len(output.outputs[0].token_ids)
            arrivals[index] += [now] * (total - before)
            before = total

    await asyncio.gather(*(one(index) for index in range(count)))


async def measure(arguments: argparse.Namespace, mode: str) -> None:
    from benchmarks.models import head_config
    from benchmarks.trainer_process import TrainerProcess
    from benchmarks.weight_sync import Native, Ours, start_engine

    colocated = arguments.transport == "ipc" and not arguments.peers
    trainer = TrainerProcess(
        arguments.size, 0, gpu=arguments.gpu, dtype=arguments.trainer_dtype, drafter=mode == "drafter"
    )
    first = arguments.gpu + (0 if colocated else 1)
    workers = arguments.tp * arguments.dp
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + i) for i in range(workers))
    # The experts are spread over the workers.
    spread: dict[str, Any] = (
        {"data_parallel_size": arguments.dp, "enable_expert_parallel": True} if arguments.dp > 1 else {}
    )
    if mode == "drafter":
        head = arguments.model / "head"
        head_config(arguments.size).save_pretrained(head)
        drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTED}
        spread = {**spread, "speculative_config": drafts}
    prefix = "slipstream_" if mode in OURS else {"wire": "staged_", "native": ""}[mode]
    receiver = prefix + arguments.transport
    sender = receiver if mode in OURS else arguments.transport
    engine = await start_engine(
        str(arguments.model),
        receiver,
        "none" if mode == "native" else "device",
        load_format="dummy",
        tensor_parallel_size=arguments.tp,
        enforce_eager=arguments.eager,
        # Both engines are up at once, so neither may take all free memory.
        gpu_memory_utilization=arguments.memory,
        kv_cache_memory_bytes=arguments.kv_gib << 30,
        **spread,
    )
    link = Native(engine) if mode == "native" else Ours(engine, states_digests=mode in OURS)
    if arguments.swaps:
        await engine.workers(swap_times.watch)
    waiting = True
    choices = {
        **{name: list(product(arguments.chunk_mb, arguments.share)) for name in OURS},
        "wire": [(0, share) for share in arguments.share],
        "native": [(0, 1.0)],
    }
    for chunk_mb, share in choices[mode]:
        engine.staging_share = share
        chunk_bytes = (chunk_mb << 20) or None
        wire = _wire(arguments, mode)
        await trainer.connect(link, sender, workers, chunk_bytes=chunk_bytes, wire=wire)
        for _ in range(3):  # the first one is loaded by vLLM and recorded
            await trainer.send(link, changed=arguments.changed)
        if waiting:  # until the other engine has been measured
            print("GAP ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            waiting = False
        await measure_idle(mode, trainer, link, chunk_mb, arguments.changed)
        for count in arguments.streams:
            await streams(engine, count, 64, [[] for _ in range(count)])
            for kv_cache in arguments.kv_cache:
                link.kv_cache = KvCache(kv_cache)
                found = await measure_under_load(arguments, engine, trainer, link, count)
                _emit(mode, {"chunk_mb": chunk_mb, "share": share, **found})
            if arguments.proof and mode == "ours":
                _emit(mode, await measure_proof(engine, arguments.proof, count))
    if arguments.soak and mode == "ours":
        await soak(arguments, engine, trainer, link)
    trainer.stop()
    await engine.stop()


def _wire(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """What the trainer engine is told, over the registry's choice for it."""
    if mode in OURS:
        return {"keep_published": arguments.keep} if arguments.keep else {}
    wire = {} if arguments.packed is None else {"packed": arguments.packed}
    if arguments.packed and arguments.transport == "ipc":
        wire["packed_buffer_size_bytes"] = 2 << 30  # the embeddings of 8B need more than vLLM's default
    # The registry chooses one buffer: vLLM 0.32's own receiver does not order more. Ours does.
    if mode == "wire" and arguments.transport == "nccl":
        wire["packed_num_buffers"] = arguments.buffers
    return wire


async def measure_idle(mode: str, trainer: Any, link: Any, chunk_mb: int, changed: float) -> None:
    idle = []
    for _ in range(4):
        seconds = await trainer.send(link, changed=changed)
        staged = link.times.staged - link.times.begin
        commit_ms = 1e3 * (link.times.live - link.times.staged)
        idle.append(
            {"send_s": round(seconds, 4), "stage_s": round(staged, 4), "commit_ms": round(commit_ms, 2)}
        )
    _emit(mode, {"idle": idle, "bytes": trainer.size_bytes, "chunk_mb": chunk_mb})


async def measure_under_load(
    arguments: argparse.Namespace, engine: Any, trainer: Any, link: Any, count: int
) -> dict[str, Any]:
    arrivals: list[list[float]] = [[] for _ in range(count)]
    load = asyncio.create_task(streams(engine, count, 3900, arrivals))
    await asyncio.sleep(LEAD_S)
    rounds, swaps = [], []
    for _ in range(arguments.rounds):
        await trainer.send(link, changed=arguments.changed)
        times = link.times
        await asyncio.sleep(SPACING_S)
        rounds.append(round_figures(arrivals, times, trainer.size_bytes))
        if arguments.swaps:
            for worker in await engine.workers(swap_times.last):
                swaps.append([round(1e3 * (each - times.staged), 2) for each in worker])
    steps = [b - a for stream in arrivals for a, b in pairwise(stream) if b < times.begin]
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await asyncio.sleep(0.3)
    return {
        "streams": count,
        "kv_cache": link.kv_cache.value,
        "step_ms": round(1e3 * median(steps), 2),
        "rounds": rounds,
        "swaps_ms": swaps,
        "timeline": [round(t - times.begin, 5) for t in arrivals[0] if abs(t - times.begin) < 0.6],
    }


async def measure_proof(engine: Any, sequences: int, count: int) -> dict[str, Any]:
    """A proof of policy beside `count` streams: how long it takes, and the generation that it costs."""
    from deployments.replica.scoring import Proof

    arrivals: list[list[float]] = [[] for _ in range(count)]
    load = asyncio.create_task(streams(engine, count, 3900, arrivals))
    await asyncio.sleep(LEAD_S)
    lasts, lost = [], []
    for _ in range(5):
        begin = time.perf_counter()
        proof = Proof(engine, sequences)
        proof.begin_if_due()
        while proof.scores is None:
            await asyncio.sleep(0.0005)
        end = time.perf_counter()
        await asyncio.sleep(SPACING_S)
        around = tokens_between(arrivals, begin - 0.5, begin) + tokens_between(arrivals, end, end + 0.5)
        lasts.append(round(1e3 * (end - begin), 1))
        lost.append(round(1e3 * (end - begin - tokens_between(arrivals, begin, end) / around), 1))
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    await asyncio.sleep(0.3)
    return {"streams": count, "proof_sequences": sequences, "proof_ms": lasts, "proof_lost_ms": lost}


async def soak(arguments: argparse.Namespace, engine: Any, trainer: Any, link: Any) -> None:
    """Rounds back to back under load: do NCCL's collectives of model and transfer block each other?"""
    link.kv_cache = KvCache.KEEP
    count = arguments.streams[0]
    arrivals: list[list[float]] = [[] for _ in range(count)]

    async def keep_busy() -> None:
        while True:
            await streams(engine, count, 800, arrivals)

    load = asyncio.create_task(keep_busy())
    await asyncio.sleep(LEAD_S)
    start, done = time.perf_counter(), 0
    while done < arguments.soak and time.perf_counter() - start < arguments.soak_s:
        await trainer.send(link)
        done += 1
    spent = time.perf_counter() - start
    tokens = tokens_between(arrivals, start, start + spent)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    _emit("ours", {"soak_rounds": done, "soak_s": spent, "tokens_per_s": tokens / spent})


def _emit(mode: str, figures: dict[str, Any]) -> None:
    """Print figures for the parent process, which reads this one's log."""
    print("GAP " + json.dumps({"mode": mode, **figures}), flush=True)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each mode in a process of its own; all figures that they print."""
    logs = [arguments.logs / f"gap-{mode}.log" for mode in arguments.modes]
    both = list(zip(arguments.modes, logs, strict=True))
    for together in [[each] for each in both] if arguments.one_engine else [both]:
        run_together(together)
    lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("GAP {")]
    return [json.loads(line[4:]) for line in lines]


def run_together(modes: list[tuple[str, Path]]) -> None:
    """Start an engine and a trainer for each mode, which writes to its log; measure one after the other.

    Raises:
        SystemExit: one of them failed.
    """
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    children, logs = [], [log for _, log in modes]
    for mode, log in modes:
        command = [sys.executable, "-m", "benchmarks.gap", *sys.argv[1:], "--only", mode]
        with log.open("w") as stream:
            children.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT
                )
            )
    while any(
        child.poll() is None and "GAP ready" not in log.read_text()
        for child, log in zip(children, logs, strict=True)
    ):
        time.sleep(0.2)
    for child in children:
        child.communicate(b"\n")
    for child, log in zip(children, logs, strict=True):
        if child.returncode != 0:
            raise SystemExit(f"{log} ends with {child.returncode}:\n{log.read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--model", type=Path, default=Path("/tmp/slipstream-models"))
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks of a mixture of experts")
    parser.add_argument(
        "--one-engine", action="store_true", help="start one mode after the other: where both do not fit"
    )
    parser.add_argument("--trainer-dtype", default="bfloat16", help="of its parameters; sent in bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--kv-cache", nargs="+", default=["keep", "recompute"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--chunk-mb", type=int, nargs="+", default=[0], help="ours; 0: the transport's default"
    )
    parser.add_argument("--share", type=float, nargs="+", default=[1.0], help="ours; weights.staging_share")
    parser.add_argument("--soak", type=int, default=0, help="ours: this many rounds back to back under load")
    parser.add_argument("--soak-s", type=float, default=60.0)
    parser.add_argument("--proof", type=int, default=0, help="ours; sequences of a proof of policy")
    parser.add_argument(
        "--swaps",
        action="store_true",
        help="print when each worker swaps, on its host and on its GPU, after the commit",
    )
    parser.add_argument("--keep", type=KeepPublished, help="ours over nccl: send differences")
    parser.add_argument("--changed", type=float, default=0.0, help="share of the numbers, between rounds")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--memory", type=float, default=0.3, help="gpu_memory_utilization of each engine")
    parser.add_argument("--kv-gib", type=int, default=16)
    parser.add_argument("--gpu", type=int, default=0, help="the trainer's; the engine's begin there or after")
    parser.add_argument(
        "--peers", action="store_true", help="ipc: the engine's GPUs begin after the trainer's"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["ours", "native"])
    parser.add_argument("--only", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument(
        "--packed", action=argparse.BooleanOptionalAction, help="wire, native; without it vLLM's default"
    )
    parser.add_argument("--buffers", type=int, default=2, help="wire over nccl, packed: of the trainer")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="directory of the engines' logs")
    arguments = parser.parse_args()
    arguments.model = arguments.model / f"{arguments.size}-config"
    if arguments.only:
        return asyncio.run(measure(arguments, arguments.only))
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        parser.error(f"GPUs are those of the machine: expected --gpu, got CUDA_VISIBLE_DEVICES={visible}")
    arguments.model.mkdir(parents=True, exist_ok=True)
    from benchmarks.models import write_config

    write_config(arguments.size, arguments.model)
    found = run(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found))
    print_table(found)


if __name__ == "__main__":
    main()
