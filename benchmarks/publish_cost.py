"""What a publish of an idle fleet on a CPU costs each process: time of its own, and of the kernel for it.

    python -m benchmarks.publish_cost [--publishes 8]

The fleet of serve_config.yaml. Page faults are first uses of 4 kB of memory, which cost the most on a virtual
machine. The first publishes connect, and touch memory that no process has had yet: look at the later ones.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from benchmarks.rl_loss import SERVE_CONFIG
from benchmarks.servers import running

PORT = 8455
REST_S = 6.0  # the store is written meanwhile
NAMES = {"ray::TrainerWor": "trainer", "VLLM::EngineCor": "engines"}  # as the kernel cuts them
OTHERS = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """By a kind of processes since they began: seconds of a core, and page faults."""

    user_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(
            user_s=self.user_s + other.user_s,
            system_s=self.system_s + other.system_s,
            faults=self.faults + other.faults,
        )

    def since(self, before: "Used") -> str:
        return (
            f"{self.user_s - before.user_s:.2f}, {self.system_s - before.system_s:.2f}, "
            f"{(self.faults - before.faults) / 1000:.0f}k"
        )


def used() -> dict[str, Used]:
    """By kind, over all processes of this machine."""
    found: dict[str, Used] = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        except (psutil.Error, OSError):  # it has ended
            continue
        one = Used(user_s=times.user, system_s=times.system, faults=int(stat[7]))
        kind = NAMES.get(process.name()[:15], OTHERS)
        found[kind] = found.get(kind, Used()) + one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--publishes", type=int, default=8)
    options = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as root:
        config = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))
        config["http_options"]["port"] = PORT
        [application] = config["applications"]
        application["args"]["state_dir"] = f"{root}/state"
        replicas = application["args"]["engine"]["num_replicas"]
        with running(config, Path(root), replicas=replicas, trainer=True) as url:
            print("Of each kind of process: user (s), system (s), page faults")
            print(
                "| publish (s) | round (s) | trainer | engines | others |\n|---|---|---|---|---|", flush=True
            )
            for _ in range(options.publishes):
                before, began = used(), time.perf_counter()
                httpx.post(f"{url}/train/publish", json={}, timeout=120).raise_for_status()
                seconds.append(time.perf_counter() - began)
                after = used()
                last = httpx.get(f"{url}/fleet/rounds").json()["rounds"][-1]
                kinds = [after[kind].since(before[kind]) for kind in (*NAMES.values(), OTHERS)]
                cells = [f"{seconds[-1]:.2f}", f"{last['duration_s']:.2f}", *kinds]
                print("| " + " | ".join(cells) + " |", flush=True)
                time.sleep(REST_S)
    print(f"median of all but the first two: {statistics.median(seconds[2:]):.2f} s")


if __name__ == "__main__":
    main()
