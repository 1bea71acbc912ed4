"""Tables for `slipstream status`, `rounds` and `adapters`, as wide as the terminal."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.poll import Check
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus, MemberStatus, ReplicaLoad, RoundStatus

T = TypeVar("T")
STYLES = {
    "serving": "green",
    "live": "green",
    "committed": "green",
    "fenced": "bold red",
    "aborted": "red",
    "retired": "dim",
}
NONE = "-"
_NO_LIMIT = 10_000


def console() -> Console:
    """Without a terminal lines are folded only if COLUMNS is set."""
    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _NO_LIMIT
    return made


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    title: str
    cell: Callable[[T], str]
    number: bool = False


def table(rows: Sequence[T], *columns: Column[T]) -> Table:
    """Without columns that have no content; rich folds those that do not fit the terminal."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    cells = [(column, [column.cell(row) for row in rows]) for column in columns]
    filled = [(column, of) for column, of in cells if any(cell not in ("", NONE) for cell in of)]
    for column, _ in filled:
        made.add_column(column.title, justify="right" if column.number else "left", overflow="fold")
    for row in zip(*(of for _, of in filled), strict=True):
        made.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return made


def fleet(
    status: FleetStatus, loads: Mapping[str, ReplicaLoad], tokens_per_s: Mapping[str, float]
) -> RenderableType:
    def loaded(show: Callable[[ReplicaLoad], str]) -> Callable[[MemberStatus], str]:
        return lambda member: show(loads[member.replica_id]) if member.replica_id in loads else NONE

    def speed(member: MemberStatus) -> str:
        made = tokens_per_s.get(member.replica_id)
        return NONE if made is None else f"{made:.0f}"

    members = table(
        status.members,
        Column("replica", lambda member: member.replica_id),
        Column("state", lambda member: "draining" if member.draining else member.state),
        Column("version", lambda member: str(member.version), number=True),
        Column("running", loaded(lambda load: f"{load.running}"), number=True),
        Column("waiting", loaded(lambda load: f"{load.waiting}"), number=True),
        Column("KV", loaded(lambda load: f"{load.kv_cache_use:.0%}"), number=True),
        Column("tokens/s", speed, number=True),
        Column("silent", lambda member: f"{member.silent_s:.1f} s", number=True),
        Column("", lambda member: member.reason if member.reason else ", ".join(member.pending)),
    )
    return Group(*_summary(status), "", members) if status.members else Group(*_summary(status))


def _summary(status: FleetStatus) -> Iterable[RenderableType]:
    serving = sum(member.admitted for member in status.members)
    label = "" if status.label is None else f" ({status.label})"
    wanted = status.size.running if status.size.wanted is None else status.size.wanted
    yield Text.assemble(
        (f"version {status.committed_version}{label}", "bold"),
        ", ",
        (f"{serving} of {wanted} replicas serve", "green" if status.ready else "bold red"),
    )
    if status.size.problem is not None:
        yield Text(f"size: {status.size.problem}", style="yellow")
    if status.condition:
        yield Text(f"engines: {', '.join(status.condition)}", style="yellow")
    stored = "empty" if status.stored_version is None else f"version {status.stored_version}"
    problem = status.store_problem
    yield Text(f"store: {stored}") if problem is None else Text(f"store: {problem}", style="bold red")
    if status.round is not None:
        yield Text(_open_round(status.round), style="cyan")
    if status.lease is not None:
        yield Text(f"publisher: {status.lease.publisher}, for {status.lease.remaining_s:.0f} s more")
    ended = [f"{count} {outcome}" for outcome, count in status.rounds_ended.items()]
    if ended:
        yield Text(f"rounds: {', '.join(ended)}")


def _open_round(current: RoundStatus) -> str:
    doing = f"{current.phase} for {current.age_s:.1f} s"
    return f"round {current.round_id}, to version {current.version}: {doing}{sent(current)}"


def sent(current: RoundStatus) -> str:
    if current.file_bytes is None:
        return ""
    return f", {decimal(current.sent_bytes)} of {decimal(current.file_bytes)}"


def rounds(reports: Sequence[RoundReport]) -> RenderableType:
    """A duration, the parts that add up to it, and the longest gap of a replica."""
    if not reports:
        return Text("no round has ended")

    def seconds_of(part: str) -> Callable[[RoundReport], str]:
        return lambda report: _seconds(report.parts.get(part, 0.0))

    parts = dict.fromkeys(part for report in reports for part in report.parts)
    return table(
        reports,
        Column("round", lambda report: str(report.round_id), number=True),
        Column("version", lambda report: str(report.version), number=True),
        Column("outcome", lambda report: report.phase),
        Column("opened", lambda report: clock(report.opened_at, "%m-%d %H:%M:%S")),
        Column("publisher", lambda report: report.publisher),
        Column("took", lambda report: _seconds(report.duration_s), number=True),
        Column("bytes", _size, number=True),
        *(Column(part, seconds_of(part), number=True) for part in parts),
        Column("gap", _gap, number=True),
        Column("verified", _verified),
        Column("", _what_happened),
    )


def _verified(report: RoundReport) -> str:
    by = {Check.DIGESTS: "publisher", Check.REPLICAS: "replicas"}
    return next((text for check, text in by.items() if check in report.checks), "none")


def _gap(report: RoundReport) -> str:
    return _seconds(max((each.gap_s for each in report.replicas.values()), default=0.0))


def _size(report: RoundReport) -> str:
    size = max((each.bytes for each in report.replicas.values()), default=0)
    return decimal(size) if size else NONE


def _what_happened(report: RoundReport) -> str:
    lost = [f"{name} fenced: {reason}" for name, reason in report.fenced.items()]
    reason = report.reason.removeprefix(f"round {report.round_id} aborted: ")
    return "; ".join(filter(None, [report.label or "", reason, *lost]))


def adapters(found: Sequence[AdapterStatus]) -> RenderableType:
    if not found:
        return Text("no adapter is loaded")
    return table(
        found,
        Column("adapter", lambda adapter: f"{adapter.name}@{adapter.version}"),
        Column("state", lambda adapter: adapter.state),
        Column("replicas", lambda adapter: str(len(adapter.replicas)), number=True),
        Column("size", lambda adapter: decimal(adapter.size_bytes), number=True),
        Column("loaded in", _load_time, number=True),
        Column("digest", lambda adapter: adapter.digest[:12]),
    )


def _load_time(adapter: AdapterStatus) -> str:
    took_s = None if adapter.timings is None else adapter.timings.total_s
    return NONE if took_s is None else _seconds(took_s)


def clock(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Local time of seconds since 1970; "-" for 0."""
    return time.strftime(form, time.localtime(at)) if at else NONE


def _seconds(duration_s: float) -> str:
    """Three digits: a gap takes milliseconds, a round of a large model minutes."""
    if duration_s == 0:
        return NONE
    if duration_s >= 100:
        return str(timedelta(seconds=round(duration_s)))
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.1f} s"
