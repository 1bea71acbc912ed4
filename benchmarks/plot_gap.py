"""A picture of tokens over time around an update, from the timelines that `benchmarks.gap --out` writes.

python -m benchmarks.plot_gap benchmarks/data/gap-8b-h200.json docs/gap.svg
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {
    "ours": ("Slipstream: staged, then swapped", "#1f6feb"),
    "native": ("vLLM's own engine, in a pause", "#c0392b"),
}


def main(source: Path, target: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    for row in json.loads(source.read_text()):
        name, colour = STYLES[row["mode"]]
        times = [1000 * second for second in row["timeline"]]
        before = sum(time < 0 for time in times)
        gap = max(later - earlier for earlier, later in pairwise(times))
        counts = [index - before for index in range(len(times))]
        axes.step(times, counts, where="post", color=colour, label=f"{name}: longest gap {gap:.0f} ms")
    axes.axvline(0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlim(-100, 400)
    axes.set_ylim(-20, 80)
    axes.set_xlabel("milliseconds since the update began")
    axes.set_ylabel("tokens of one stream")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
