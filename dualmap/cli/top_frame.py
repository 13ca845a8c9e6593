"""A picture of `dualmap top` drawn with rich: header, instances, services, last changes. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dualmap.cli.top_picture import Event, InstanceRow, Picture
from dualmap.cli.top_sources import Answer
from dualmap.core.state import LoadReport
from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_operator import RingFacts
from dualmap.rpc.convert_rebalance import RebalancerStatus

V = TypeVar("V")

SHOWN_EVENTS = 5
WIDE_COLUMNS = 120

_BAR_CELLS = 8
_STATE_STYLES = {
    "ACTIVE": "green",
    "WARMING": "cyan",
    "DRAINING": "yellow",
    "SUSPECT": "bold red",
    "UNREACHABLE": "bold red",
    "LEFT": "dim",
}
_WARN_SHARE = 0.5
"""Of the SLO: a backlog beyond it is about to cost requests theirs."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the screen holds: instance rows, and columns of text."""

    rows: int
    columns: int

    @property
    def wide(self) -> bool:
        """Whether all columns fit, and two tables side by side."""
        return self.columns >= WIDE_COLUMNS


def frame(picture: Picture, room: Room) -> RenderableType:
    """The whole frame; of more instances than fit, those with the longest backlog."""
    now_s = picture.sample.at_s
    return Group(
        _header(picture),
        _instances(picture, room),
        _beside(_routers(picture), _control(picture), room),
        _beside(
            _events("last ring changes", picture.ring_events, now_s),
            _events("last migrations", picture.moves, now_s),
            room,
            ratio=(2, 3),
        ),
    )


def _beside(
    left: RenderableType, right: RenderableType, room: Room, ratio: tuple[int, int] | None = None
) -> RenderableType:
    if not room.wide:
        return Group(left, right)
    grid = Table.grid(expand=True)
    for share in ratio or (None, None):
        grid.add_column(ratio=share)
    grid.add_row(left, right)
    return grid


def _header(picture: Picture) -> RenderableType:
    facts = picture.sample.ring
    states = [row.state for row in picture.rows]
    line = Text.assemble(("DualMap ", "bold"))
    if facts is not None:
        line.append(f"pool {facts.ring.pool}   ring {facts.ring.epoch}   ")
    line.append(f"{states.count('ACTIVE')} of {len(states)} instances active   ")
    if facts is not None:
        line.append(
            f"{len(facts.ring.splits)} split prefixes   last change moved {facts.last_moved_share:.0%} of pairs"
        )
    total, window_s = picture.total, picture.window_s
    when = f"last {window_s:.0f} s" if window_s else "since start"
    figures = [f"{when}: {total.finished} finished"]
    if window_s:
        figures.append(f"{total.finished / window_s:.1f}/s")
    figures += [
        f"in SLO {_percent(total.attainment)}",
        f"hit rate {_percent(total.hit_rate)}",
        f"share CV {picture.share_cv:.2f}" if picture.share_cv is not None else "share CV -",
    ]
    waiting = sum(row.load.waiting_requests for row in picture.rows if row.load is not None)
    running = sum(row.load.running_requests for row in picture.rows if row.load is not None)
    figures += [f"waiting {waiting}", f"running {running}"]
    return Group(line, Text("   ".join(figures)))


def _instances(picture: Picture, room: Room) -> RenderableType:
    columns = [column for column in _COLUMNS if room.wide or not column.wide_only]
    table = Table(box=box.SIMPLE_HEAD, expand=True, header_style="bold", padding=(0, 1))
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis")
    rows: Sequence[InstanceRow] = picture.rows
    if len(rows) > room.rows:
        busiest = sorted(rows, key=lambda row: row.backlog_s or 0.0, reverse=True)[: room.rows]
        kept = {row.instance_id for row in busiest}
        rows = [row for row in rows if row.instance_id in kept]
        table.caption = f"and {len(picture.rows) - room.rows} more with less backlog"
    slo_s = picture.sample.ring.ring.default_ttft_slo_ms / 1000 if picture.sample.ring is not None else None
    for row in rows:
        table.add_row(*(column.cell(row, slo_s) for column in columns))
    return table


def _routers(picture: Picture) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1))
    for name in ("router", "id", "ring", "state age", "booked", ""):
        table.add_column(name, no_wrap=True)
    for answer in picture.sample.routers:
        view = answer.value
        if view is None:
            table.add_row(answer.address, _no_answer(answer))
            continue
        table.add_row(
            answer.address,
            f"{view.router_id:016x}"[:8],
            _epoch(view.ring_epoch, picture),
            _oldest(view),
            str(sum(instance.bookings for instance in view.instances)),
            Text("degraded", style="bold red") if view.degraded else Text("ok", style="green"),
        )
    return table


def _control(picture: Picture) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1))
    table.add_column("control plane", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("")
    for ring in picture.sample.ring_managers:
        table.add_row("ring manager", ring.address, *_ring_manager_cells(ring, picture))
    for collector in picture.sample.collectors:
        polled = None
        if collector.value is not None:
            polled = sum(facts.polled_ago_ms >= 0 for facts in collector.value.instances)
        table.add_row(
            "collector", collector.address, _no_answer(collector), f"polls {polled}" if polled is not None else ""
        )
    for rebalancer in picture.sample.rebalancers:
        table.add_row("rebalancer", rebalancer.address, *_rebalancer_cells(rebalancer))
    return table


def _ring_manager_cells(answer: Answer[RingFacts], picture: Picture) -> tuple[RenderableType, RenderableType]:
    if answer.value is None:
        return _no_answer(answer), ""
    return _role(leader=answer.value.leader), _epoch(answer.value.ring.epoch, picture)


def _rebalancer_cells(answer: Answer[RebalancerStatus]) -> tuple[RenderableType, RenderableType]:
    status = answer.value
    if status is None:
        return _no_answer(answer), ""
    what = f"moved {status.moved} of {status.planned}"
    if status.failed_rounds:
        what += f", {status.failed_rounds} rounds failed"
    return _role(leader=status.leader), what + (", dry run" if status.dry_run else "")


def _events(title: str, events: Sequence[Event], now_s: float) -> RenderableType:
    lines = []
    for event in list(events)[-SHOWN_EVENTS:][::-1]:
        when = f"{now_s - event.at_s:4.0f} s ago" if event.at_s is not None else "   earlier"
        lines.append(Text.assemble((when, "dim"), "  ", event.text, no_wrap=True, overflow="ellipsis"))
    lines = lines or [Text("none seen", style="dim")]
    return Panel(Group(*lines), title=title, title_align="left")


def _no_answer(answer: Answer[V]) -> Text:
    """Why there is no value; empty where there is one."""
    if answer.failure is None:
        return Text("")
    silent = answer.failure.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    return Text("no answer" if silent else answer.failure.code, style="bold red")


def _role(*, leader: bool) -> Text:
    return Text("leader", style="bold green") if leader else Text("standby", style="dim")


def _epoch(epoch: int, picture: Picture) -> Text:
    """The epoch's last digits, red where it is behind the newest ring."""
    newest = picture.sample.ring.ring.epoch if picture.sample.ring is not None else epoch
    return Text(
        f"…{epoch % 1_000_000:06d}" if epoch >= 1_000_000 else str(epoch), style="" if epoch >= newest else "red"
    )


def _oldest(view: ViewFacts) -> str:
    ages = [instance.state_age_ms for instance in view.instances]
    if any(age < 0 for age in ages):
        return "never heard"
    return f"{max(ages):.0f} ms" if ages else "-"


def _backlog(backlog_s: float | None, slo_s: float | None) -> Text:
    if backlog_s is None:
        return Text("-")
    style = ""
    if slo_s is not None and backlog_s >= _WARN_SHARE * slo_s:
        style = "bold red" if backlog_s >= slo_s else "yellow"
    return Text(f"{backlog_s:.2f}", style=style)


def _full(waiting: int, *, admitting: bool) -> Text:
    return Text(str(waiting)) if admitting else Text(f"{waiting} full", style="bold red")


def _bar(share: float) -> Text:
    cells = round(min(1.0, share) * _BAR_CELLS)
    return Text.assemble(("━" * cells, "blue"), ("━" * (_BAR_CELLS - cells), "dim"))


def _percent(share: float | None) -> str:
    return f"{share:.1%}" if share is not None else "-"


Cell = Callable[[InstanceRow, float | None], RenderableType]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the instance table; ``cell`` takes the row and the SLO in seconds."""

    name: str
    cell: Cell
    right: bool = True
    wide_only: bool = False


def _loaded(cell: Callable[[LoadReport], RenderableType]) -> Cell:
    """A cell of the load, where one is known."""
    return lambda row, _: cell(row.load) if row.load is not None else "-"


_COLUMNS = (
    _Column("instance", lambda row, _: row.instance_id, right=False),
    _Column("state", lambda row, _: Text(row.state, style=_STATE_STYLES.get(row.state, "")), right=False),
    _Column("queue", _loaded(lambda load: _full(load.waiting_requests, admitting=load.admitting))),
    _Column("run", _loaded(lambda load: str(load.running_requests))),
    _Column("backlog s", lambda row, slo_s: _backlog(row.backlog_s, slo_s)),
    _Column("booked s", lambda row, _: f"{row.booked_s:.2f}", wide_only=True),
    _Column("hit", lambda row, _: _percent(row.counts.hit_rate)),
    _Column("in SLO", lambda row, _: _percent(row.counts.attainment), wide_only=True),
    _Column("share", lambda row, _: _percent(row.share)),
    _Column("KV use", _loaded(lambda load: f"{load.kv_use:.0%}")),
    _Column("", _loaded(lambda load: _bar(load.kv_use)), right=False, wide_only=True),
    _Column("blocks", lambda row, _: str(row.kv_blocks) if row.kv_blocks is not None else "-", wide_only=True),
    _Column("in/out", _loaded(lambda load: f"{load.moved_in}/{load.moved_out}"), wide_only=True),
    _Column("polled", lambda row, _: f"{row.age_ms:.0f} ms" if row.age_ms >= 0 else "-", wide_only=True),
)
