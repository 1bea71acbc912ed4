"""Time from command to healthy, and the memory of everything that is not an engine or the trainer.

python -m benchmarks.control_plane

Memory is the proportional set size: pages shared between processes are counted once. A replica's
own process runs vLLM's API server, as that of `vllm serve` does, and counts as engine.
"""

import time

import psutil

from benchmarks.servers import fleet

ENGINE = ("VLLM::", "ray::ServeReplica:slipstream:rollout")
TRAINER = ("ray::ServeReplica:slipstream:trainer", "ray::TrainerWorker")


def main() -> None:
    before = {process.pid for process in psutil.process_iter()}
    begin = time.perf_counter()
    with fleet(8431, replicas=2, trainer=True):
        took = time.perf_counter() - begin
        time.sleep(5)
        sizes: dict[str, int] = {"engines": 0, "trainer": 0, "control plane": 0}
        rows: list[tuple[int, str]] = []
        for process in psutil.process_iter(["name"]):
            if process.pid in before or process.pid == psutil.Process().pid:
                continue
            name = process.info["name"] or ""
            try:
                size = process.memory_full_info().pss
                title = " ".join(process.cmdline())[:60]
            except psutil.Error:  # it has ended meanwhile
                continue
            kind = _kind(title if title.startswith("ray::") else name)
            sizes[kind] += size
            if kind == "control plane":
                rows.append((size, title))
    print(f"from command to healthy with two replicas and a trainer: {took:.1f} s\n")
    print("| part | memory (PSS) |")
    print("|---|---|")
    for name, size in sizes.items():
        print(f"| {name} | {size / 1e6:.0f} MB |")
    print("\nthe control plane, largest first:")
    for size, title in sorted(rows, reverse=True)[:12]:
        print(f"  {size / 1e6:6.0f} MB  {title}")


def _kind(title: str) -> str:
    if title.startswith(ENGINE):
        return "engines"
    return "trainer" if title.startswith(TRAINER) else "control plane"


if __name__ == "__main__":
    main()
