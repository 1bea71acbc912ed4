"""The longest time for which streaming clients receive no token while weights change, on a CPU, and how much
longer their answers take because of it.

python -m benchmarks.update_gap [--rounds 3] [--streams 4] [--kv-cache keep]

Slipstream: a round from the trainer, staged while generating. The peer: what a project without Slipstream
does with one `vllm serve`, which is to save a checkpoint, pause, load it from disk, resume. It keeps the KV
caches of running requests, as Slipstream does with `kv_cache: keep`; its default is to compute them again.

On few cores processes of other sessions, such as these clients, may wait seconds for a core while an engine
decodes:
`echo 0 > /proc/sys/kernel/sched_autogroup_enabled` before, or gaps are those of the clients.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from safetensors.torch import load_file, save_file

from app.settings.models import resolve_model
from benchmarks.load import Load, Measured, run
from benchmarks.servers import MODEL, fleet, vllm_serve


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--kv-cache", nargs="+", default=["keep", "recompute"], help="of the fleets")
    args = parser.parse_args(arguments)
    load = Load(requests=args.streams, concurrency=args.streams, max_tokens=args.tokens)
    print(f"| {args.streams} streams, {MODEL}, float32 | longest gap | gaps | answers take | update took |")
    print("|---|---|---|---|---|", flush=True)
    with vllm_serve(8441) as peer, tempfile.TemporaryDirectory() as root:
        idle = _measure("vllm serve, no update", peer, load, args.rounds, lambda: None)
        reload = partial(_reload, peer, Path(root))
        name = "vllm serve: save, pause, reload from disk, resume"
        _measure(name, peer, load, args.rounds, reload, idle)
    for kv_cache in args.kv_cache:
        with fleet(8431, trainer=True, weights={"kv_cache": kv_cache}) as ours:
            idle = _measure("slipstream, no update", ours, load, args.rounds, lambda: None)
            name = f"slipstream: a round over shared memory, {kv_cache}"
            _measure(name, ours, load, args.rounds, partial(_publish, ours), idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured in some rounds; medians but for the gaps.

    Attributes:
        gaps_ms: the longest gap of each round.
        answered_s: from the first request to the end of the last answer.
        idle: the same server without updates.
    """

    name: str
    gaps_ms: tuple[float, ...]
    answered_s: float
    took_s: float
    idle: "Row | None"

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap_ms:.0f}" for gap_ms in sorted(self.gaps_ms))
        more = "" if self.idle is None else f" (+{self.answered_s - self.idle.answered_s:.2f})"
        took = "" if self.idle is None else f"{self.took_s:.2f} s"
        longest_ms = statistics.median(self.gaps_ms)
        return f"| {self.name} | {longest_ms:.0f} ms | {gaps} | {self.answered_s:.2f} s{more} | {took} |"


def _measure(
    name: str, url: str, load: Load, rounds: int, update: Callable[[], None], idle: Row | None = None
) -> Row:
    """Measure and print."""

    def once() -> tuple[Measured, float]:
        with ThreadPoolExecutor(1) as pool:
            streams = pool.submit(run, url, load)
            time.sleep(2.0)
            begin = time.perf_counter()
            update()
            took = time.perf_counter() - begin
            return streams.result(), took

    if idle is None:
        once()  # the first requests of a server take longer
    else:
        update()  # and so does its first update
    results = [once() for _ in range(rounds)]
    row = Row(
        name=name,
        gaps_ms=tuple(measured.longest_gap_ms for measured, _ in results),
        answered_s=statistics.median(
            load.requests * load.max_tokens / each.tokens_per_s for each, _ in results
        ),
        took_s=statistics.median(took for _, took in results),
        idle=idle,
    )
    print(row, flush=True)
    return row


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
