import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

STATUS_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    step: int
    steps: int
    doing: str
    detail: str
    version: int
    elapsed_s: float
    reward: float | None = None
    left_s: float | None = None

    def line(self) -> str:
        left = "" if self.left_s is None else f", {duration_text(self.left_s)} left"
        return (
            f"step {self.step} of {self.steps}: {self.doing}; {self.detail}, version {self.version}, "
            f"{duration_text(self.elapsed_s)}{left}"
        )


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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
