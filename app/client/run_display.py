"""Progress of a run: the job sends lines and status events, the submitter's terminal draws them.

job ── lines and events (text) ──► Ray's log ──► submitter ──► Display: a bar in a terminal, else lines
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

# Set by the submitter for its job.
EVENTS = "SLIPSTREAM_EVENTS"  # the submitter reads events
WORKING_DIR = "SLIPSTREAM_WORKING_DIR"  # the user's directory
STATUS_S = 30.0  # between lines of status without a bar
CHANGED_S, SAME_S = 1.0, 10.0
EVENT = "run-status "  # prefix of an event's line


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    step: int  # in progress
    steps: int
    doing: str
    detail: str  # what it waits for, what was left out
    version: int
    elapsed_s: float
    reward: float | None = None
    left_s: float | None = None  # None: unknown

    def line(self) -> str:
        left = "" if self.left_s is None else f", {duration_text(self.left_s)} left"
        return (
            f"step {self.step} of {self.steps}: {self.doing}; {self.detail}, version {self.version}, "
            f"{duration_text(self.elapsed_s)}{left}"
        )

    def event(self) -> str:
        return EVENT + json.dumps(asdict(self))


def status_of(line: str) -> RunStatus | None:
    """Parse an event; None for any other line."""
    if not line.startswith(EVENT):
        return None
    return RunStatus(**json.loads(line.removeprefix(EVENT)))


def duration_text(seconds: float) -> str:
    """A readable time: 40 s, 3 min, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Events:
    """Prints lines, and status events when they change, at least every `SAME_S`."""

    def __init__(self) -> None:
        self._sent: RunStatus | None = None
        self._sent_at = 0.0

    def line(self, text: str) -> None:
        print(text, flush=True)

    def status(self, status: RunStatus) -> None:
        now = time.monotonic()
        is_same = self._sent is not None and _timeless(status) == _timeless(self._sent)
        if self._sent is None or now - self._sent_at >= (SAME_S if is_same else CHANGED_S):
            self._sent, self._sent_at = status, now
            print(status.event(), flush=True)

    def close(self) -> None:
        """Nothing is open."""


def _timeless(status: RunStatus) -> RunStatus:
    return replace(status, elapsed_s=0.0, left_s=None)


class Display:
    """Draws a bar in a terminal; elsewhere prints the status after `status_s` without output."""

    def __init__(self, status_s: float = STATUS_S) -> None:
        from rich.console import Console

        self._console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._status_s = status_s
        self._printed = time.monotonic()
        self._has_bar = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """Print a line above the bar; an event updates it."""
        if (status := status_of(text)) is not None:
            self.status(status)
            return
        if self._has_bar:
            self._console.print(text)
        else:
            print(text, flush=True)
        self._printed = time.monotonic()

    def status(self, status: RunStatus) -> None:
        if self._has_bar:
            self._draw(status)
        elif time.monotonic() - self._printed >= self._status_s:
            self.line(status.line())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, status: RunStatus) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
        from rich.text import Text

        if self._live is None:
            columns = (
                SpinnerColumn(),
                BarColumn(None),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, expand=True)
            self._bar.add_task("", total=status.steps)
            self._live = Live(console=self._console, transient=True, redirect_stderr=False)
            self._live.start()
        assert self._bar is not None
        reward = "" if status.reward is None else f"reward {status.reward:.3f} "
        left = "" if status.left_s is None else f"{duration_text(status.left_s)} left"
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=status.step - 1, description=f"{reward}{left}")
        doing = Text(f"{status.doing}; {status.detail}", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, doing))


Output = Events | Display


def output(environment: Mapping[str, str] = os.environ) -> Output:
    """Events for a submitter, or a display."""
    return Events() if environment.get(EVENTS) else Display()
