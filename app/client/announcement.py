"""Progress lines of programs that wait: never silent for more than a few seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

QUIET_S = 4.0  # longest time without a line


def tell(line: str, to: TextIO | None = None) -> None:
    """Print a line; `to` None: to stdout. Its reader may be gone: Ctrl-C ends a `| tee` too."""
    with suppress(OSError):
        print(line, file=to, flush=True)


@contextmanager
def announced(
    what: str,
    quiet_s: float = QUIET_S,
    to: TextIO | None = None,
    ask: Callable[[], str] = str,
) -> Iterator[Callable[[str], None]]:
    """Print `what` at once, and again with the elapsed time while the block runs.

    Args:
        to: None: stdout.
        ask: called before each line; returns the progress, empty if unknown.

    Yields:
        A function that sets the progress, for a block that knows it itself.
    """
    began = time.monotonic()
    progress = ""
    tell(what, to)
    over = threading.Event()

    def say(how_far: str) -> None:
        nonlocal progress
        progress = how_far

    def repeat() -> None:
        while not over.wait(quiet_s):
            parts = [ask() or progress, f"{time.monotonic() - began:.0f} s"]
            tell(f"{what}: {', '.join(filter(None, parts))}", to)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
