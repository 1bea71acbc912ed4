"""What a job prints while it runs: never silent for more than a few seconds.

In a terminal it is a bar; in a log file a line, whenever nothing else was printed for a while.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

from app.client.announcement import QUIET_S

CHECK_S = 0.5


class Progress:
    """The bar of a run, and its lines; `done` steps are those of the run that is resumed."""

    def __init__(self, *, steps: int, done: int, state: Callable[[], str], quiet_s: float = QUIET_S) -> None:
        self._state = state
        self._quiet_s = quiet_s
        self._printed = time.monotonic()
        self._bar = tqdm(total=steps, initial=done, unit="step", desc="grpo", disable=not sys.stderr.isatty())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        tqdm.write(line)
        sys.stdout.flush()
        self._printed = time.monotonic()

    def advance(self) -> None:
        self._bar.update()

    async def watch(self) -> None:
        """Show the state while nothing else is printed; runs until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self._quiet_s))
            if not self._bar.disable:
                self._bar.set_postfix_str(self._state())
            elif time.monotonic() - self._printed >= self._quiet_s:
                self.say(self._state())
