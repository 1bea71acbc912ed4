"""Digests on the device: rate, against the device's own copy rate and SHA-256 on the host.

python -m benchmarks.digest
"""

import hashlib
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], rounds: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def main() -> None:
    from deployments.weights.wire.digest import digest_tensor, digests, prepare_inspection
    from deployments.weights.wire.digest_definition import Copy

    gigabyte = 1 << 30
    whole = torch.randn(8 * gigabyte // 2, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(whole)
    layers = list(whole.split(25 << 20))
    small = list(whole[: gigabyte // 2].split(96 << 10))
    host = whole[: gigabyte // 8].cpu()
    small_host = host.view(torch.uint8).numpy().tobytes()
    halves = list(zip(layers, other.split(25 << 20), strict=True))
    copies = [Copy(index=index, source=source, target=to) for index, (source, to) in enumerate(halves)]
    rows = [
        ("device copy (read and write)", 2 * 8 * gigabyte, seconds(lambda: other.copy_(whole))),
        ("digest, one tensor", 8 * gigabyte, seconds(lambda: digest_tensor([whole]))),
        (f"digest, {len(layers)} tensors", 8 * gigabyte, seconds(lambda: digest_tensor(layers))),
        (
            "digest and copy in one pass (read and write)",
            2 * 8 * gigabyte,
            seconds(prepare_inspection(layers, copies)),
        ),
        (f"digest, {len(small)} tensors of 192 KiB", gigabyte, seconds(lambda: digest_tensor(small))),
        ("torch's sum (float32), one tensor", 8 * gigabyte, seconds(lambda: whole.sum(dtype=torch.float32))),
        ("digest on the host, one core", len(small_host), seconds(lambda: digests([host]), 1)),
        ("SHA-256 on the host", len(small_host), seconds(lambda: hashlib.sha256(small_host).digest(), 1)),
    ]
    same = digests([whole[: gigabyte // 8]]) == digests([host])
    print("| what | GB | ms | GB/s |\n|---|---|---|---|")
    for name, size, spent in rows:
        print(f"| {name} | {size / 1e9:.2f} | {1e3 * spent:.2f} | {size / spent / 1e9:.0f} |")
    print(f"device and host agree: {same}")


if __name__ == "__main__":
    main()
