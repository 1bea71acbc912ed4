"""Memory that an engine on a CPU frees stays with it for the next update.

An update takes as much memory as the model has, and frees as much when it has been swapped in. glibc gives it
back to the kernel, which clears each page anew in the next update: that took an engine longer than all else
(`benchmarks/RESULTS.md`, "What a publish of an idle fleet on a CPU costs"). What an engine holds between
updates is what it needs in one anyway.
"""

import os

_NEVER = str(1 << 34)  # bytes; one arena, because others give whole heaps back, whatever the limits say
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": _NEVER,
    "MALLOC_MMAP_THRESHOLD_": _NEVER,
}


def keep_freed_memory() -> None:
    """For processes that are started from now on and use glibc's allocator; what is set already stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
