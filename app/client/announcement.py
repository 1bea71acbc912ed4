"""Progress lines of programs that wait: never silent for more than a few seconds."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

QUIET_S = 10.0  # longest time without a line
REDRAWN_S = 1.0  # the same in a terminal
_CLEAR = "\r\x1b[2K"  # from the first column: Ctrl-C has printed ^C


def _is_redrawn(to: TextIO | None = None) -> bool:
    """Whether `_tell_for_now` replaces its last line; `to` None: stdout."""
    return (sys.stdout if to is None else to).isatty() and os.environ.get("TERM") != "dumb"


def tell(line: str, to: TextIO | None = None) -> None:
    """Print a line; `to` None: to stdout. Its reader may be gone: Ctrl-C ends a `| tee` too."""
    _print(f"{_CLEAR if _is_redrawn(to) else ''}{line}", "\n", to)


def _tell_for_now(line: str, to: TextIO | None = None) -> None:
    """Print a line that the next one replaces in a terminal, and that stays elsewhere."""
    if _is_redrawn(to):  # a line that wraps could not be cleared
        _print(f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}", "\r", to)
    else:
        _print(line, "\n", to)


def _print(text: str, end: str, to: TextIO | None) -> None:
    with suppress(OSError):
        print(text, end=end, file=to, flush=True)


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
        to: None: stdout.
        ask: called before each line; returns the progress, empty if unknown.

    Yields:
        A function that sets the progress, for a block that knows it itself.
    """
    began = time.monotonic()
    progress = ""
    tell(what, to)
    over = threading.Event()
    redrawn = _is_redrawn(to)

    def say(how_far: str) -> None:
        nonlocal progress
        progress = how_far

    def repeat() -> None:
        while not over.wait(REDRAWN_S if redrawn else quiet_s):
            parts = [ask() or progress, f"{time.monotonic() - began:.0f} s"]
            _tell_for_now(f"{'  ' if redrawn else f'{what}: '}{', '.join(filter(None, parts))}", to)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
        if redrawn:
            _print(_CLEAR, "", to)
