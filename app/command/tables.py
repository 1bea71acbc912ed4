"""What `slipstream status`, `rounds` and `adapters` print: tables for people, as wide as their terminal."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus, MemberStatus, ReplicaLoad, RoundStatus

STYLES = {
    "serving": "green",
    "live": "green",
    "committed": "green",
    "fenced": "bold red",
    "aborted": "red",
    "retired": "dim",
}
NONE = "-"
_NO_LIMIT = 10_000  # columns
_WORD_WIDTH, _TEXT_WIDTH = 24, 12  # folded below it: names and numbers, sentences


def console() -> Console:
    """Standard output. Lines are not folded if it is no terminal, unless COLUMNS says how wide it is."""
    made = Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _NO_LIMIT
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    title: str
    cells: Sequence[str]
    number: bool = False
    leaves: int = 0  # what does not fit leaves the table, the greatest first; 0: stays, and is folded


class FittedTable:
    """A table without the columns that do not fit, and without those that have nothing to say."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = [each for each in columns if any(cell not in ("", NONE) for cell in each.cells)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(self._columns)
        while True:
            made = _table(left)
            last = max(left, key=lambda column: column.leaves, default=None)
            needed = Measurement.get(console, options.update_width(_NO_LIMIT), made).minimum
            if last is None or last.leaves == 0 or needed <= options.max_width:
                yield made
                return
            left.remove(last)


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.number else "left",
            min_width=_min_width(column),
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


def _min_width(column: Column) -> int:
    longest = max(map(len, [column.title, *column.cells]))
    return min(longest, _WORD_WIDTH if column.title else _TEXT_WIDTH)


def fleet(
    status: FleetStatus, loads: Mapping[str, ReplicaLoad], tokens_per_s: Mapping[str, float]
) -> RenderableType:
    """The fleet in a few lines, and one row for each replica."""
    members = status.members

    def of_load(show: Callable[[ReplicaLoad], str]) -> list[str]:
        found = [loads.get(member.replica_id) for member in members]
        return [NONE if load is None else show(load) for load in found]

    ids = [member.replica_id for member in members]
    speeds = [f"{tokens_per_s[each]:.0f}" if each in tokens_per_s else NONE for each in ids]
    table = FittedTable(
        [
            Column(title="replica", cells=ids),
            Column(title="state", cells=[_state(member) for member in members]),
            Column(title="version", cells=[str(member.version) for member in members], number=True),
            Column(title="running", cells=of_load(lambda load: f"{load.running}"), number=True, leaves=1),
            Column(title="waiting", cells=of_load(lambda load: f"{load.waiting}"), number=True, leaves=2),
            Column(title="KV", cells=of_load(lambda load: f"{load.kv_cache_use:.0%}"), number=True, leaves=4),
            Column(title="tokens/s", cells=speeds, number=True, leaves=3),
            Column(
                title="silent",
                cells=[f"{member.silent_s:.1f} s" for member in members],
                number=True,
                leaves=5,
            ),
            Column(title="", cells=[_remark(member) for member in members]),
        ]
    )
    return Group(*_summary(status), "", table) if members else Group(*_summary(status))


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
    if status.store_problem is not None:
        yield Text(f"store: {status.store_problem}", style="bold red")
    else:
        yield Text(
            f"store: {'empty' if status.stored_version is None else f'version {status.stored_version}'}"
        )
    if status.round is not None:
        yield Text(_open_round(status.round), style="cyan")
    if status.lease is not None:
        yield Text(f"publisher: {status.lease.publisher}, for {status.lease.remaining_s:.0f} s more")
    ended = [f"{count} {outcome}" for outcome, count in status.rounds_ended.items()]
    if ended:
        yield Text(f"rounds: {', '.join(ended)}")


def _open_round(current: RoundStatus) -> str:
    sent = ""
    if current.file_bytes is not None:
        sent = f", {decimal(current.sent_bytes)} of {decimal(current.file_bytes)}"
    doing = f"{current.phase} for {current.age_s:.1f} s"
    return f"round {current.round_id}, to version {current.version}: {doing}{sent}"


def _state(member: MemberStatus) -> str:
    return "draining" if member.draining else member.state


def _remark(member: MemberStatus) -> str:
    return member.reason if member.reason else ", ".join(member.pending)


def rounds(reports: Sequence[RoundReport]) -> RenderableType:
    """One row for each round. What it waited for adds up to what it took; the gap is the longest one."""
    if not reports:
        return Text("no round has ended")
    parts = dict.fromkeys(part for report in reports for part in report.parts)
    return FittedTable(
        [
            Column(title="round", cells=[str(report.round_id) for report in reports], number=True, leaves=7),
            Column(title="version", cells=[str(report.version) for report in reports], number=True),
            Column(title="outcome", cells=[report.phase for report in reports]),
            Column(title="opened", cells=[_clock(report.opened_at) for report in reports], leaves=4),
            Column(title="publisher", cells=[report.publisher for report in reports], leaves=5),
            Column(
                title="took", cells=[_seconds(each.duration_s) for each in reports], number=True, leaves=1
            ),
            Column(title="bytes", cells=[_bytes(report) for report in reports], number=True, leaves=3),
            *(
                Column(
                    title=part,
                    cells=[_seconds(report.parts.get(part, 0.0)) for report in reports],
                    number=True,
                    leaves=2,
                )
                for part in parts
            ),
            Column(title="gap", cells=[_gap(report) for report in reports], number=True),
            Column(title="verified", cells=[report.verification for report in reports], leaves=6),
            Column(title="", cells=[_what_happened(report) for report in reports]),
        ]
    )


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at)) if at else NONE


def _gap(report: RoundReport) -> str:
    return _seconds(max((each.gap_s for each in report.replicas.values()), default=0.0))


def _bytes(report: RoundReport) -> str:
    size = max((each.bytes for each in report.replicas.values()), default=0)
    return decimal(size) if size else NONE


def _what_happened(report: RoundReport) -> str:
    lost = [f"{name} fenced: {reason}" for name, reason in report.fenced.items()]
    return "; ".join(filter(None, [report.label or "", report.reason, *lost]))


def adapters(found: Sequence[AdapterStatus]) -> RenderableType:
    """One row for each version of an adapter."""
    if not found:
        return Text("no adapter is loaded")
    return FittedTable(
        [
            Column(title="adapter", cells=[f"{each.name}@{each.version}" for each in found]),
            Column(title="state", cells=[each.state for each in found]),
            Column(title="replicas", cells=[str(len(each.replicas)) for each in found], number=True),
            Column(title="size", cells=[decimal(each.size_bytes) for each in found], number=True, leaves=1),
            Column(title="loaded in", cells=[_load_time(each) for each in found], number=True, leaves=2),
            Column(title="digest", cells=[each.digest[:12] for each in found], leaves=3),
        ]
    )


def _load_time(adapter: AdapterStatus) -> str:
    took_s = None if adapter.timings is None else adapter.timings.total_s
    return NONE if took_s is None else _seconds(took_s)


def _seconds(duration_s: float) -> str:
    """Three digits are enough: a gap takes milliseconds, a round of a large model minutes."""
    if duration_s == 0:
        return NONE
    if duration_s >= 100:
        return str(timedelta(seconds=round(duration_s)))
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.1f} s"
