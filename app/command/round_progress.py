"""A bar for a round that reads its weights from files, while `slipstream publish` waits for it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from app.client import calls
from app.client.connection import FleetClient, FleetError, token_from
from deployments.protocol.responses import RoundStatus

ASK_S = 0.3
ANSWER_S = 10.0
MIB = 1 << 20


@contextmanager
def progress_shown(url: str) -> Iterator[None]:
    """Show the round's progress while the block runs; the block reports errors."""
    ended, done = threading.Event(), threading.Event()
    watching = threading.Thread(target=_watch, args=(url, ended, done), daemon=True)
    watching.start()
    try:
        yield
        done.set()
    finally:
        ended.set()
        watching.join(ANSWER_S)


def _watch(url: str, ended: threading.Event, done: threading.Event) -> None:
    try:
        with FleetClient.connect(url, token_from(), timeout_s=ANSWER_S) as fleet:
            current = fleet.send(calls.fleet()).round
            while (current is None or current.file_bytes is None) and not ended.wait(ASK_S):
                current = fleet.send(calls.fleet()).round
            if current is not None and current.file_bytes is not None:
                _follow(fleet, current, ended, done)
    except FleetError:
        return


def _follow(fleet: FleetClient, first: RoundStatus, ended: threading.Event, done: threading.Event) -> None:
    total = _mib(first.file_bytes)
    with typer.progressbar(length=total, label=_label(first), file=sys.stderr, show_pos=True) as bar:
        current: RoundStatus | None = first
        while current is not None and current.round_id == first.round_id:
            bar.label = _label(current)
            bar.update(_mib(current.sent_bytes) - bar.pos)
            if ended.wait(ASK_S):
                break
            current = fleet.send(calls.fleet()).round
        if done.is_set():
            bar.update(total - bar.pos)


def _label(current: RoundStatus) -> str:
    phase = "replicas read and stage (MiB)" if current.phase == "open" else current.phase
    return f"version {current.version}: {phase}"


def _mib(size_bytes: int | None) -> int:
    return 0 if size_bytes is None else -(-size_bytes // MIB)
