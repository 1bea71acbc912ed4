"""What a run shows: lines, and where it is. The job sends both, a terminal near the user draws them.

    job ── lines and events (text) ──► Ray's log ──► submitter ──► Display: a bar in a terminal, else lines

`events` says whether a job is to send its status as events, which are lines with a prefix.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

# What a submitter sets for its job.
EVENTS = "SLIPSTREAM_EVENTS"  # it reads the output
WORKING_DIR = "SLIPSTREAM_WORKING_DIR"  # where its user stands
STATUS_S = 30.0  # between two lines of status, where no bar is drawn
CHANGED_S, SAME_S = 1.0, 10.0  # between two events
EVENT = "run-status "  # how the line of an event begins


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where a run is."""

    step: int  # that is being made
    steps: int
    doing: str
    detail: str  # what it waits for, what was left out
    version: int
    elapsed_s: float
    reward: float | None = None  # of the last step
    left_s: float | None = None  # None: not known yet

    def line(self) -> str:
        left = "" if self.left_s is None else f", {span(self.left_s)} left"
        return (
            f"step {self.step} of {self.steps}: {self.doing}; {self.detail}, version {self.version}, "
            f"{span(self.elapsed_s)}{left}"
        )

    def event(self) -> str:
        return EVENT + json.dumps(asdict(self))


def status_of(line: str) -> RunStatus | None:
    """The status that a line of a job's output is; None: it is for people."""
    if not line.startswith(EVENT):
        return None
    return RunStatus(**json.loads(line.removeprefix(EVENT)))


def span(seconds: float) -> str:
    """A time as people say it: 40 s, 3 min, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Output(Protocol):
    """Where a run's lines and its status go."""

    def line(self, text: str) -> None: ...

    def status(self, status: RunStatus) -> None: ...

    def close(self) -> None: ...


def output(environment: Mapping[str, str] = os.environ) -> Output:
    """A job's output: events for its submitter, or a display of its own."""
    return Events() if environment.get(EVENTS) else Display()


class Events:
    """Prints each line, and a status as an event: when it has changed, and now and then."""

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
    """Draws a bar in a terminal; elsewhere the status is a line, when nothing else was printed for a while.

    Args:
        status_s: that while.
    """

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

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def line(self, text: str) -> None:
        """Print a line, above the bar; an event is its status."""
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
        left = "" if status.left_s is None else f"{span(status.left_s)} left"
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=status.step - 1, description=f"{reward}{left}")
        doing = Text(f"{status.doing}; {status.detail}", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, doing))
