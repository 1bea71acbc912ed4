"""What the processes of a fleet hold while it runs, and whether that stays flat.

Sampler.sample() ──► Sample per process: resident and proportional memory, open files, threads
growth(samples)  ──► per process and figure: the slope after the warm-up, and a verdict
"""

import contextlib
import os
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "SLIPSTREAM_BENCHMARK"  # set by the benchmark, inherited by every process of the fleet
WARM_UP = 0.3  # of the samples
MIB = 1 << 20
SHARED = "/dev/shm"
GPU = "GPU memory"
# What a figure may grow from the beginning of what is compared to its end, and still be called flat.
ALLOWED = {"rss_mib": 16.0, "pss_mib": 16.0, "files": 8.0, "threads": 4.0}
ALLOWED_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one moment, or what no process has alone (`/dev/shm`, GPU memory), as process id 0.

    Attributes:
        rounds: that had been made by then.
    """

    rounds: int
    pid: int
    title: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One figure of one process after the warm-up.

    Attributes:
        slope: of the line through the medians of its pairs (Theil and Sen), per 100 rounds.
    """

    pid: int
    title: str
    figure: str
    samples: int
    first: float
    last: float
    slope: float

    @property
    def flat(self) -> bool:
        """The line rises by no more than is allowed over the rounds that were compared."""
        return self.rise <= max(ALLOWED.get(self.figure, 0.0), ALLOWED_SHARE * self.first)

    @property
    def rise(self) -> float:
        return self.last - self.first


class Sampler:
    """Samples every process with the mark.

    Args:
        mark: the value of `MARK` in the fleet's environment.
    """

    def __init__(self, mark: str) -> None:
        self._wanted = f"{MARK}={mark}".encode()
        self.samples: list[Sample] = []

    def sample(self, rounds: int) -> None:
        for pid in list(self._pids()):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                figures = _figures(Path(f"/proc/{pid}"))
                self.samples.append(Sample(rounds=rounds, pid=pid, title=title(pid), figures=figures))
        self.samples.append(Sample(rounds=rounds, pid=0, title=SHARED, figures=_shared_memory()))
        if (used := _gpu_mib()) is not None:
            self.samples.append(Sample(rounds=rounds, pid=0, title=GPU, figures={"used_mib": used}))

    def _pids(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if self._wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Each figure of each process that was there from the warm-up to the end."""
    rounds = sorted({sample.rounds for sample in samples})
    begin = rounds[int(len(rounds) * WARM_UP)]
    lines: dict[tuple[int, str, str], list[tuple[int, float]]] = defaultdict(list)
    for sample in samples:
        if sample.rounds >= begin:
            for figure, value in sample.figures.items():
                lines[sample.pid, sample.title, figure].append((sample.rounds, value))
    found = []
    for (pid, title, figure), points in lines.items():
        if len(points) < 3 or points[0][0] > begin or points[-1][0] < rounds[-1]:
            continue
        slope = _slope(points)
        middle = statistics.median(value for _, value in points)
        half = slope * (points[-1][0] - points[0][0]) / 2
        found.append(
            Growth(
                pid=pid,
                title=title,
                figure=figure,
                samples=len(points),
                first=middle - half,
                last=middle + half,
                slope=100 * slope,
            )
        )
    return found


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """The median of the slopes of all pairs: single outliers do not move it."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] != earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def _figures(directory: Path) -> dict[str, float]:
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", (directory / "smaps_rollup").read_text(), re.MULTILINE))
    return {
        "rss_mib": int(memory["Rss"]) * 1024 / MIB,
        "pss_mib": int(memory["Pss"]) * 1024 / MIB,
        "files": float(len(os.listdir(directory / "fd"))),
        "threads": float(len(os.listdir(directory / "task"))),
    }


def title(pid: int) -> str:
    """What a process runs, in short."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    title = words[0].strip()
    if "python" in title:  # the module or script that it runs
        title = next((word for word in words[1:] if word and not word.startswith("-")), title)
    return title.rsplit("/", 1)[-1][:60]


def _shared_memory() -> dict[str, float]:
    sizes = []
    for path in Path(SHARED).iterdir():
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_blocks * 512)
    return {"segments": float(len(sizes)), "used_mib": sum(sizes) / MIB}


def _gpu_mib() -> float | None:
    """Of the GPUs that this process may use; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        return sum(float(line) for line in output.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
