"""The longest time for which streaming clients receive no token while weights change, on a CPU.

python -m benchmarks.update_gap [--rounds 3] [--streams 4]

Slipstream: a round from the trainer, staged while generating. The peer: what a project without Slipstream
does with one `vllm serve`, which is to save a checkpoint, pause, load it from disk, resume. It keeps the KV
caches of running requests, as Slipstream does with `kv_cache: keep`; its default is to compute them again.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
from safetensors.torch import load_file, save_file

from app.settings.models import resolve_model
from benchmarks.load import Load, run
from benchmarks.servers import MODEL, fleet, vllm_serve


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    args = parser.parse_args(arguments)
    load = Load(requests=args.streams, concurrency=args.streams, max_tokens=160)
    rows = []
    with vllm_serve(8441) as peer, tempfile.TemporaryDirectory() as root:
        rows.append(("vllm serve, no update", *_measure(peer, load, args.rounds, lambda: None)))
        rows.append(
            (
                "vllm serve: save, pause, reload from disk, resume",
                *_measure(peer, load, args.rounds, lambda: _reload(peer, Path(root))),
            )
        )
    for kv_cache in ("recompute", "keep"):
        with fleet(8431, trainer=True, weights={"kv_cache": kv_cache}) as ours:
            if kv_cache == "recompute":
                rows.append(("slipstream, no update", *_measure(ours, load, args.rounds, lambda: None)))
            name = f"slipstream: a round over shared memory, {kv_cache}"
            rows.append((name, *_measure(ours, load, args.rounds, partial(_publish, ours))))
    print(f"| {args.streams} streams, {MODEL}, float32 | longest gap (median) | update took |")
    print("|---|---|---|")
    for name, gap_ms, took_s in rows:
        print(f"| {name} | {gap_ms:.0f} ms | {took_s:.2f} s |")


def _measure(url: str, load: Load, rounds: int, update: Callable[[], None]) -> tuple[float, float]:
    """Median over the rounds of the longest gap (ms), and of the update's duration (s)."""

    def once() -> tuple[float, float]:
        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(run, url, load)
            time.sleep(2.0)
            begin = time.perf_counter()
            update()
            took = time.perf_counter() - begin
            return streams.result().longest_gap_ms, took

    results = [once() for _ in range(rounds)]
    return statistics.median(gap for gap, _ in results), statistics.median(took for _, took in results)


def _publish(url: str) -> None:
    httpx.post(f"{url}/train/publish", json={}, timeout=300).raise_for_status()


def _reload(url: str, root: Path) -> None:
    source = Path(resolve_model(MODEL))
    target = root / "checkpoint"
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            save_file(load_file(file), target / file.name, metadata={"format": "pt"})
        elif not (target / file.name).exists():
            (target / file.name).symlink_to(file)
    httpx.post(f"{url}/pause?mode=keep", timeout=300).raise_for_status()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
    httpx.post(f"{url}/collective_rpc", json=body, timeout=300).raise_for_status()
    httpx.post(f"{url}/resume", timeout=300).raise_for_status()


if __name__ == "__main__":
    main()
