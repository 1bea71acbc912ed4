"""Progress lines: a waiting program is never silent for more than a few seconds."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

QUIET_S = 10.0
REDRAWN_S = 1.0  # terminals only
_CLEAR = "\r\x1b[2K"  # first column: Ctrl-C has printed ^C


def _redraws(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM") != "dumb"


def tell(line: str, to: TextIO | None = None, *, for_now: bool = False) -> None:
    """Print a line, to stdout unless `to` is given. Its reader may be gone: Ctrl-C ends a `| tee` too.
    `for_now`: in a terminal the next line replaces it."""
    out, end = sys.stdout if to is None else to, "\n"
    if _redraws(out):
        if for_now:  # a line that wraps could not be cleared
            line, end = line[: shutil.get_terminal_size().columns - 1], "\r"
        line = f"{_CLEAR}{line}"
    with suppress(OSError):
        print(line, end=end, file=out, flush=True)


@contextmanager
def announced(
    what: str,
    quiet_s: float = QUIET_S,
    to: TextIO | None = None,
    ask: Callable[[], str] = str,
) -> Iterator[Callable[[str], None]]:
    """Print `what` at once, and then the elapsed time while the block runs.

    Args:
        quiet_s: between two lines; a terminal has one, which is redrawn.
        ask: called before each line; returns the progress, empty if unknown.

    Yields:
        A function that sets the progress, for a block that knows it itself.
    """
    began = time.monotonic()
    progress = ""
    tell(what, to)
    over = threading.Event()
    redrawn = _redraws(sys.stdout if to is None else to)

    def say(how_far: str) -> None:
        nonlocal progress
        progress = how_far

    def repeat() -> None:
        while not over.wait(REDRAWN_S if redrawn else quiet_s):
            parts = [ask() or progress, f"{time.monotonic() - began:.0f} s"]
            tell(f"{'  ' if redrawn else f'{what}: '}{', '.join(filter(None, parts))}", to, for_now=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
        if redrawn:
            tell("", to, for_now=True)
