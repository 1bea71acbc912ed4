"""The figures of one update, from the times at which tokens arrived, and their table."""

import json
from bisect import bisect
from itertools import pairwise
from typing import Any

SETTLE_S = 0.5
AFTER_S = 0.05  # what the update costs after the commit was reported counts as well


def tokens_between(arrivals: list[list[float]], start: float, end: float) -> int:
    """How many tokens arrived in (start, end]."""
    return sum(start < t <= end for times in arrivals for t in times)


def round_figures(arrivals: list[list[float]], times: Any, size_bytes: int) -> dict[str, float]:
    """The figures of one round.

    Lost tokens are relative to the rate just before and just after the round, because tokens take longer as
    the requests grow. All windows begin and end with a step: one step more or less would be a tenth of what
    is measured.
    """
    steps = sorted(t for stream in arrivals for t in stream)
    first = steps[bisect(steps, times.begin - SETTLE_S)]
    begin = steps[bisect(steps, times.begin) - 1]
    staged = steps[bisect(steps, times.staged) - 1]
    end = steps[min(bisect(steps, times.live + AFTER_S), len(steps) - 1)]
    last = steps[min(bisect(steps, end + SETTLE_S), len(steps) - 1)]
    rate = (tokens_between(arrivals, first, begin) + tokens_between(arrivals, end, last)) / (
        begin - first + last - end
    )
    pairs = [pair for stream in arrivals for pair in pairwise(stream)]
    gaps = [b - a for a, b in pairs if b > times.staged - 0.002 and a < end]
    steps_near = (b - a for a, b in pairs if b > times.begin and a < end)
    staging = times.staged - times.begin
    return {
        "gap_ms": 1e3 * max(gaps, default=float("nan")),
        "longest_step_ms": 1e3 * max(steps_near, default=0.0),
        "lost_s": (end - begin) - tokens_between(arrivals, begin, end) / rate,
        "lost_staging_s": (staged - begin) - tokens_between(arrivals, begin, staged) / rate,
        "tokens_while_staging": tokens_between(arrivals, begin, staged) / (rate * (staged - begin)),
        "round_s": times.live - times.begin,
        "stage_s": staging,
        "gb_per_s": size_bytes / staging / 1e9,
        "commit_ms": 1e3 * (times.live - times.staged),
    }


def print_table(found: list[dict[str, Any]]) -> None:
    columns = (
        "gap_ms",
        "longest_step_ms",
        "lost_s",
        "lost_staging_s",
        "tokens_while_staging",
        "round_s",
        "gb_per_s",
        "commit_ms",
    )
    setting = ("mode", "chunk_mb", "share", "streams", "kv_cache", "step_ms")
    print("| " + " | ".join([*setting, *columns]) + " |\n" + "|---" * len([*setting, *columns]) + "|")
    for entry in found:
        if "rounds" not in entry:
            shown = {key: value for key, value in entry.items() if key != "mode"}
            print(f"| {entry['mode']} | " + json.dumps(shown) + " |")
            continue
        cells = []
        for column in columns:
            values = [r[column] for r in entry["rounds"]]
            cells.append(f"{min(values):.3g} to {max(values):.3g}")
        print("| " + " | ".join([*(str(entry[name]) for name in setting), *cells]) + " |")
    for entry in found:
        for swap in entry.get("swaps_ms", ()):
            print("swap of a worker, ms after the commit: host {} to {}, GPU {} to {}".format(*swap))
