"""A picture of `dualmap top` drawn with rich: header, instances, services, last changes. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dualmap.cli.top_picture import Event, InstanceRow, Picture
from dualmap.cli.top_sources import Answer
from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_operator import RingFacts
from dualmap.rpc.convert_rebalance import RebalancerStatus

V = TypeVar("V")

SHOWN_EVENTS = 5

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


def frame(picture: Picture, max_rows: int) -> RenderableType:
    """The whole frame; of more than ``max_rows`` instances, those with the longest backlog."""
    return Group(
        _header(picture),
        _instances(picture, max_rows),
        Columns([_routers(picture), _control(picture)], expand=True),
        Columns(
            [
                _events("last ring changes", picture.ring_events, picture.sample.at_s),
                _events("last migrations", picture.moves, picture.sample.at_s),
            ],
            expand=True,
        ),
    )


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


def _instances(picture: Picture, max_rows: int) -> RenderableType:
    table = Table(expand=True, header_style="bold")
    table.add_column("instance", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("queue", "run", "backlog s", "booked s", "hit", "in SLO", "share", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV use", no_wrap=True)
    table.add_column("in/out", justify="right", no_wrap=True)
    table.add_column("polled", justify="right", no_wrap=True)
    rows: Sequence[InstanceRow] = picture.rows
    if len(rows) > max_rows:
        busiest = sorted(rows, key=lambda row: row.backlog_s or 0.0, reverse=True)[:max_rows]
        kept = {row.instance_id for row in busiest}
        rows = [row for row in rows if row.instance_id in kept]
        table.caption = f"and {len(picture.rows) - max_rows} more with less backlog"
    slo_s = picture.sample.ring.ring.default_ttft_slo_ms / 1000 if picture.sample.ring is not None else None
    for row in rows:
        table.add_row(*_cells(row, slo_s))
    return table


def _cells(row: InstanceRow, slo_s: float | None) -> Iterable[RenderableType]:
    load = row.load
    yield row.instance_id
    yield Text(row.state, style=_STATE_STYLES.get(row.state, ""))
    yield _full(load.waiting_requests, admitting=load.admitting) if load is not None else "-"
    yield str(load.running_requests) if load is not None else "-"
    yield _backlog(row.backlog_s, slo_s)
    yield f"{row.booked_s:.2f}"
    yield _percent(row.counts.hit_rate)
    yield _percent(row.counts.attainment)
    yield _percent(row.share)
    yield str(row.kv_blocks) if row.kv_blocks is not None else "-"
    yield _bar(load.kv_use) if load is not None else "-"
    yield f"{load.moved_in}/{load.moved_out}" if load is not None else "-"
    yield f"{row.age_ms:.0f} ms" if row.age_ms >= 0 else "-"


def _routers(picture: Picture) -> RenderableType:
    table = Table(title="routers", title_justify="left", header_style="bold", expand=True)
    for name in ("address", "id", "epoch", "known", "oldest state", "booked", ""):
        table.add_column(name, no_wrap=name != "")
    for answer in picture.sample.routers:
        view = answer.value
        if view is None:
            table.add_row(answer.address, _no_answer(answer))
            continue
        table.add_row(
            answer.address,
            f"{view.router_id:016x}"[:8],
            _epoch(view.ring_epoch, picture),
            str(len(view.instances)),
            _oldest(view),
            str(sum(instance.bookings for instance in view.instances)),
            Text("degraded", style="bold red") if view.degraded else Text("ok", style="green"),
        )
    return table


def _control(picture: Picture) -> RenderableType:
    table = Table(title="control plane", title_justify="left", header_style="bold", expand=True)
    table.add_column("part", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("role")
    table.add_column("what it does")
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
    what = f"{status.moved} moved of {status.planned} planned, {status.rounds} rounds"
    if status.failed_rounds:
        what += f", {status.failed_rounds} failed"
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
    return Text.assemble(("━" * cells, "blue"), ("━" * (_BAR_CELLS - cells), "dim"), f" {share:4.0%}")


def _percent(share: float | None) -> str:
    return f"{share:.1%}" if share is not None else "-"
