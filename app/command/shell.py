"""What commands share: errors as one sentence, signals that stop them, periods of --watch."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds becomes a sentence and exit status 1."""
    try:
        yield
    except kinds as error:
        print(f"slipstream: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def ticks(repeat: bool, period_s: float) -> Iterator[None]:
    yield
    while repeat:
        time.sleep(period_s)
        yield


def stop_signals() -> list[signal.Signals]:
    """SIGHUP stays ignored under `nohup`."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return numbers[: 2 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 3]
