"""What programs print while something takes long: never silent for more than a few seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_S = 4.0  # longest time without a line


@contextmanager
def announced(
    what: str, quiet_s: float = QUIET_S, to: TextIO | None = None
) -> Iterator[Callable[[str], None]]:
    """Print what is being done before it blocks, and again while it lasts; `to` None: to stdout.
    Yields what says how far it is, for the next line."""
    began = time.monotonic()
    progress = ""
    print(what, file=to, flush=True)
    over = threading.Event()

    def say(how_far: str) -> None:
        nonlocal progress
        progress = f" {how_far},"

    def repeat() -> None:
        while not over.wait(quiet_s):
            print(f"{what}:{progress} {time.monotonic() - began:.0f} s", file=to, flush=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
