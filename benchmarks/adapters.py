"""How long a new version of a LoRA adapter takes to all replicas, what streams notice, and what grows.

    python -m benchmarks.adapters --loads 300 --every 0.3
    python -m benchmarks.adapters --device cuda --model DIR_8B --rank 32 --streams 16 --trainer

One fleet; streams of the base and of the adapter run in a process of their own. Meanwhile the same name is
loaded again and again from directories that a trainer could have written, through vLLM's own route. Prints
the time of a load, the longest time between two pieces of any stream during loads and in as much time without
one (one table, the same run), and the figures of the fleet's processes that grow; exits with 1 if a load
failed or something grows.

With `--trainer` the fleet has a trainer of an adapter of the same size as well, and after each load it
publishes: as tensors over the fleet's transport, and not through a directory. With `--steps` it has made a
step before, and saves its state with it. It needs a GPU of its own, or with `--transport ipc` has a rank on
the GPU of each replica.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch
from safetensors.torch import save_file

from app.settings.models import resolve_model
from benchmarks.process_samples import MARK, Sampler, growth
from benchmarks.servers import CPU, MODEL, Setup, fleet, gpu

NAME, TRAINED = "policy", "trained"
TOKENS = 256
SETTLE_S = 2.0
SAMPLES = 20
Window = tuple[float, float]


def write_adapter(model: Path, directory: Path, rank: int, seed: int) -> int:
    """A random adapter of every linear layer in peft's files; returns its bytes."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{name}.lora_{half}.weight"] = values.bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in shapes],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return (directory / "adapter_model.safetensors").stat().st_size


async def _streams(url: str, count: int, end: Any, times: list[list[float]], bad: list[str]) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def one(index: int) -> None:
            body = {
                "model": NAME if index % 2 else MODEL,
                **{"prompt": [5 + index, 6, 7], "max_tokens": TOKENS, "ignore_eos": True, "stream": True},
            }
            while not end.is_set():
                pieces = []
                async with session.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        bad.append(f"{answer.status}: {(await answer.text())[:200]}")
                        return
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            pieces.append(time.monotonic())
                times.append(pieces)

        await asyncio.gather(*(one(index) for index in range(count)))


def _load(url: str, count: int, end: Any, pipe: Connection) -> None:
    times: list[list[float]] = []
    bad: list[str] = []
    asyncio.run(_streams(url, count, end, times, bad))
    pipe.send((times, bad))


def put(client: httpx.Client, directory: Path) -> Window:
    """Load the adapter as the next version of its name."""
    began = time.monotonic()
    asked = {"lora_name": NAME, "lora_path": str(directory), "load_inplace": True}
    answer = client.post("/v1/load_lora_adapter", json=asked)
    if answer.status_code != 200:
        raise SystemExit(f"the load was answered with {answer.status_code}: {answer.text[:500]}")
    return began, time.monotonic()


def step(client: httpx.Client) -> None:
    """An optimizer's step on made-up answers, so that the next publish saves a state as well."""
    one = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9], "logprobs": [-1.0, -1.0]}
    batch = [{**one, "advantage": sign} for sign in (1.0, -1.0)]
    answer = client.post("/train/step", json={"trajectories": batch})
    if answer.status_code != 200:
        raise SystemExit(f"the step was answered with {answer.status_code}: {answer.text[:500]}")


def publish(client: httpx.Client) -> tuple[Window, dict[str, Any]]:
    """Have the trainer publish its adapter; how long that took, and its report."""
    began = time.monotonic()
    answer = client.post("/train/publish", json={})
    if answer.status_code != 200:
        raise SystemExit(f"the publish was answered with {answer.status_code}: {answer.text[:500]}")
    window = began, time.monotonic()
    report: dict[str, Any] = answer.json()
    return window, report


def parts(reports: list[dict[str, Any]]) -> str:
    """What a publish is made of: medians, in ms."""
    return ", ".join(
        f"{each} {1e3 * statistics.median(report[each] for report in reports):.0f} ms"
        for each in ("write_s", "duration_s")
    )


def phases(client: httpx.Client, name: str) -> dict[str, float]:
    """Where the time of the newest version of a name went, in ms; of the replicas the slowest."""
    listed = client.get("/fleet/adapters").json()["adapters"]
    newest = max((each for each in listed if each["name"] == name), key=lambda each: each["version"])
    timings = newest["timings"]
    found = {part: timings[part] for part in ("copy_s", "sync_s", "load_s", "total_s")}
    for part in ("read_s", "add_s"):
        found[part] = max(each[part] for each in timings["replicas"].values())
    return {part: 1e3 * seconds for part, seconds in found.items()}


def medians(found: list[dict[str, float]]) -> str:
    return ", ".join(f"{part} {statistics.median(each[part] for each in found):.0f} ms" for part in found[0])


def longest(times: list[list[float]], windows: Iterable[Window]) -> list[float]:
    """For each window the longest time between two pieces of a stream that overlaps it."""
    pairs = [pair for stream in times for pair in pairwise(stream)]
    return [max((b - a for a, b in pairs if b > begin and a < end), default=0.0) for begin, end in windows]


def _ms(window: Window) -> float:
    return 1e3 * (window[1] - window[0])


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    high = ordered[int(0.95 * (len(ordered) - 1))]
    return f"{1e3 * statistics.median(ordered):.0f} | {1e3 * high:.0f} | {1e3 * ordered[-1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default=MODEL, help="a built-in model, or a directory")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--loads", type=int, default=30)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two loads")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--port", type=int, default=9740)
    parser.add_argument(
        "--trainer", action="store_true", help="a trainer publishes an adapter after each load"
    )
    parser.add_argument(
        "--steps", action="store_true", help="with a step before each publish, which then saves"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: it starts sooner")
    parser.add_argument("--transport", choices=["nccl", "ipc"], default="nccl", help="with --device cuda")
    options = parser.parse_args()
    model = Path(resolve_model(options.model))
    setup: Setup = CPU if options.device == "cpu" else gpu(model, transport=options.transport)
    extra = {"enable_lora": True, "max_lora_rank": options.rank, "max_loras": 8 if options.trainer else 4}
    extra |= setup.engine.get("extra", {})
    setup = replace(setup, model=str(model), engine=setup.engine | {"extra": extra})
    if options.eager:
        setup.engine["enforce_eager"] = True
    os.environ[MARK] = mark = uuid.uuid4().hex
    sampler = Sampler(mark)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        directories = [Path(root) / str(seed) for seed in range(4)]
        sizes = [write_adapter(model, each, options.rank, seed) for seed, each in enumerate(directories)]
        settings: dict[str, Any] = {"security": {"checkpoint_roots": [root]}}
        if options.trainer:
            lora = {"name": TRAINED, "rank": options.rank, "alpha": options.rank}
            dtype = setup.engine["dtype"]
            section = {"dtype": dtype, "wire_dtype": "bfloat16", "lora": lora}
            if setup.settings.get("placement") == "colocated":
                section |= {"gpus_per_rank": 0.5, "world_size": options.replicas}
                section["strategy"] = "single" if options.replicas == 1 else "fsdp2"
            setup = replace(setup, settings=setup.settings | {"trainer": section})
        with (
            fleet(
                options.port, setup=setup, replicas=options.replicas, trainer=options.trainer, **settings
            ) as url,
            httpx.Client(base_url=url, timeout=120) as client,
        ):
            first = put(client, directories[0])
            mine, theirs = context.Pipe()
            end = context.Event()
            loading = context.Process(target=_load, args=(url, options.streams, end, theirs), daemon=True)
            loading.start()
            time.sleep(5 * SETTLE_S)
            quiet, windows, published = [], [], []
            loads, sent = [], []
            every = max(1, options.loads // SAMPLES)
            for number in range(options.loads):
                before = time.monotonic()
                time.sleep(options.every)
                windows.append(put(client, directories[(1 + number) % len(directories)]))
                loads.append(phases(client, NAME))
                # As long as the load, right before it.
                quiet.append((max(before, 2 * windows[-1][0] - windows[-1][1]), windows[-1][0]))
                print(f"load {number}: {_ms(windows[-1]):.0f} ms", file=sys.stderr, flush=True)
                if options.trainer:
                    time.sleep(options.every)
                    if options.steps:
                        step(client)
                    published.append(publish(client))
                    sent.append(phases(client, TRAINED))
                    window, report = published[-1]
                    text = f"publish {number}: {_ms(window):.0f} ms, {parts([report])}"
                    print(text, file=sys.stderr, flush=True)
                if number % every == 0:
                    sampler.sample(number)
            sampler.sample(options.loads)
            time.sleep(SETTLE_S)
            end.set()
            times, bad = mine.recv()
            loading.join(30)
        took = [end - begin for begin, end in windows]
        print(
            f"{model.name}, {options.replicas} replicas, rank {options.rank}, {sizes[0] / 1e6:.0f} MB, "
            f"{options.streams} streams, {len(took)} loads; the first, without streams: "
            f"{_ms(first):.0f} ms"
        )
        print("\n| | median (ms) | 95 % (ms) | longest (ms) |\n|---|---|---|---|")
        print(f"| a load, until all replicas have it | {spread(took)} |")
        print(f"| longest wait of a stream during a load | {spread(longest(times, windows))} |")
        if published:
            spans = [window for window, _ in published]
            took = [end - begin for begin, end in spans]
            print(f"| a publish of the trainer's, until all replicas have it | {spread(took)} |")
            print(f"| longest wait of a stream during a publish | {spread(longest(times, spans))} |")
        print(f"| the same in as long without one | {spread(longest(times, quiet))} |")
        print(f"\nof a load: {medians(loads)}")
        if published:
            print(f"a publish: {parts([report for _, report in published])}; of its load: {medians(sent)}")
        print(f"\nstreams: {len(times)} whole, {len(bad)} refused {bad[:1] or ''}")
        growing = [each for each in growth(sampler.samples) if not each.flat]
        for each in growing:
            print(f"grows: {each.title} {each.pid or ''} {each.figure}: {each.first:.1f} to {each.last:.1f}")
    sys.exit(1 if growing or bad else 0)


if __name__ == "__main__":
    main()
