"""Calls the fleet for the command line. Prints a table or the fleet's own JSON; an error is one sentence."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from app.client import calls
from app.client.announcement import announced
from app.client.connection import Call, FleetClient, FleetError, token_from, without_credentials
from app.command import tables
from app.command.shell import ticks
from deployments.protocol.errors import NotFound
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetLoad

T = TypeVar("T")
ANSWER_S = 10.0  # deadline of a call that only reads
PROGRESS_S = 2.0
PERIOD_S = 2.0  # between two frames of --watch
_NO_MODEL = "NotFoundError"  # vLLM's type; for a route it has another one
Ask = Callable[[FleetClient], T]


def run(url: str, call: Call[Any], announcement: str | None = None) -> None:
    """Send a call that changes the fleet, without a deadline; print a round as a table in a terminal, else
    JSON. `announcement`: for a call that publishes, printed with the round's progress."""
    watched: AbstractContextManager[Any] = nullcontext()
    if announcement is not None:
        watched = announced(announcement, to=sys.stderr, ask=partial(_round_progress, url))
    try:
        with watched, connected(url, None) as fleet:
            answer = fleet.send(call)
    except KeyboardInterrupt:
        print("slipstream: interrupted; the fleet may still do it: see `slipstream status`", file=sys.stderr)
        raise typer.Exit(130) from None
    if isinstance(answer, RoundReport) and sys.stdout.isatty():
        tables.console().print(tables.rounds([answer]))
    else:
        print(json.dumps(asdict(answer), indent=2))


def _round_progress(url: str) -> str:
    try:
        with FleetClient.connect(url, token_from(), timeout_s=PROGRESS_S) as fleet:
            current = fleet.send(calls.fleet()).round
    except FleetError:  # the call itself reports it
        return ""
    return "" if current is None else f"{current.phase}{tables.sent(current)}"


def show_status(url: str, *, as_json: bool, watch: bool) -> None:
    before: FleetLoad | None = None

    def table(fleet: FleetClient) -> RenderableType:
        nonlocal before
        status = fleet.send(calls.fleet())
        try:
            load = fleet.send(calls.load())
        except FleetError:  # shown without the load of its engines
            return tables.fleet(status, {}, {})
        speeds = {} if before is None else tokens_per_s(before, load)
        before = load
        return tables.fleet(status, load.replicas, speeds)

    _show(url, lambda fleet: asdict(fleet.send(calls.fleet())), table, as_json=as_json, watch=watch)


def tokens_per_s(before: FleetLoad, now: FleetLoad) -> dict[str, float]:
    """Without replicas whose engine restarted meanwhile."""
    made = {
        name: now.replicas[name].generated_tokens - before.replicas[name].generated_tokens
        for name in before.replicas.keys() & now.replicas.keys()
    }
    period_s = now.at - before.at
    return {name: tokens / period_s for name, tokens in made.items() if tokens >= 0 and period_s > 0}


def show_rounds(url: str, *, as_json: bool, watch: bool, last: int | None) -> None:
    def ask(fleet: FleetClient, most: int | None) -> Sequence[RoundReport]:
        reports = fleet.send(calls.rounds())
        return reports if most is None else reports[-most:]

    _show(
        url,
        lambda fleet: {"rounds": [asdict(report) for report in ask(fleet, last)]},
        lambda fleet: tables.rounds(ask(fleet, 20 if last is None else last)),
        as_json=as_json,
        watch=watch,
    )


def show_adapters(url: str, *, as_json: bool, watch: bool) -> None:
    _show(
        url,
        lambda fleet: {"adapters": [asdict(each) for each in fleet.send(calls.adapters())]},
        lambda fleet: tables.adapters(fleet.send(calls.adapters())),
        as_json=as_json,
        watch=watch,
    )


def _show(url: str, document: Ask[object], table: Ask[RenderableType], *, as_json: bool, watch: bool) -> None:
    with suppress(KeyboardInterrupt), connected(url, ANSWER_S) as fleet:
        if as_json:
            for _ in ticks(watch, PERIOD_S):
                print(json.dumps(document(fleet), indent=None if watch else 2), flush=True)
        elif watch:
            _draw(frames(url, fleet, table, ticks(True, PERIOD_S)))
        else:
            tables.console().print(table(fleet))


def _draw(frames: Iterable[RenderableType]) -> None:
    """In place; without a terminal frame below frame."""
    console = tables.console()
    if not console.is_terminal:
        for frame in frames:
            console.print(frame, end="\n\n")
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in frames:
            live.update(frame, refresh=True)


def frames(
    url: str, fleet: FleetClient, table: Ask[RenderableType], ticks: Iterable[object]
) -> Iterator[RenderableType]:
    """A sentence replaces the table while the fleet does not respond. Raises FleetError if the first call
    fails."""
    for number, _ in enumerate(ticks):
        try:
            shown = table(fleet)
        except FleetError as error:
            if number == 0:
                raise
            shown = Text(explained(url, error), style="bold red")
        yield shown


@contextmanager
def connected(url: str, timeout_s: float | None) -> Iterator[FleetClient]:
    """A FleetError of the block becomes a sentence and exit status 1."""
    try:
        with FleetClient.connect(url, token_from(), timeout_s=timeout_s) as fleet:
            yield fleet
    except FleetError as error:
        print(f"slipstream: {explained(url, error)}", file=sys.stderr)
        raise typer.Exit(1) from error


def explained(url: str, error: FleetError) -> str:
    """The fleet's message, and a remedy that the fleet cannot know."""
    if error.status is None:
        return f"{error.message}: start a fleet, or give its address with --url or SLIPSTREAM_URL"
    if error.status == 503 and not error.type:  # what /health answers before a replica serves
        return f"the fleet at {without_credentials(url)[0]} is not ready: {error.message}"
    known = error.status != 404 or error.type in (NotFound.type, _NO_MODEL)
    if not error.type or not known:
        said = " ".join(str(error).split())
        return (
            f"expected a Slipstream fleet of this version at {without_credentials(url)[0]}, got {said:.200}"
        )
    if error.status == 401:
        given = "another one" if token_from() else "none"
        return (
            f"{error.message} (401): this command expects it in SLIPSTREAM_TOKEN or in the file "
            f"SLIPSTREAM_TOKEN_FILE, and found {given}"
        )
    return f"{error.message} ({error.status})"
