"""Memory that a process on a CPU frees stays with it for the next update, or the next step.

An update takes as much memory as the model has, and frees as much when it has been swapped in; a training
step takes more, for activations. glibc gives it back to the kernel, which clears each page anew the next
time: that took an engine longer than all else (`benchmarks/RESULTS.md`, "What a publish of an idle fleet on
a CPU costs"). What such a process holds in between is what it needs again anyway.
"""

import os

_NEVER = str(1 << 34)  # bytes; one arena, because others give whole heaps back, whatever the limits say
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": _NEVER,
    "MALLOC_MMAP_THRESHOLD_": _NEVER,
}


def keeping_freed_memory() -> dict[str, str]:
    """The environment of a process that keeps it, if it uses glibc's allocator. What is set already stays."""
    return {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
