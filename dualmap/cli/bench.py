"""`dualmap bench`: what a route, a rebalance round and a cached block cost, each beside what it is compared with.

It prints ratios measured side by side in one run; milliseconds stand beside them and judge nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dualmap.cli.bench_agent import agent
from dualmap.cli.bench_cluster import View
from dualmap.cli.bench_decision import DecisionFigures, decisions
from dualmap.cli.bench_memory import PAPER_BLOCKS, BlockMemory, DecisionMemory, block_memory, decision_memory
from dualmap.cli.bench_queue import queue
from dualmap.cli.bench_rebalance import PlanFigures, plans
from dualmap.cli.bench_report import Comparison, comparison_table, machine, write
from dualmap.cli.bench_route import (
    Overload,
    RouteOptions,
    churn_against_quiet,
    overload,
    route_rows,
    workers_row,
)
from dualmap.cli.bench_scaling import bench_scaling
from dualmap.cli.bench_state import bench_state

app = typer.Typer(help="Measure and compare: routes, rebalance rounds, memory. Without a command: all three.")
app.command("agent")(agent)
app.command("queue")(queue)
app.command("state")(bench_state)
app.command("scaling")(bench_scaling)

_DECISIONS = 20_000
_WIDTH = 132
_MEMORY_DECISIONS = 200_000

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures here; - is stdout.")]
InstancesOption = Annotated[int, typer.Option(min=2, max=4096, help="Instances in the router's view.")]
BlocksOption = Annotated[int, typer.Option(min=64, max=10_000_000, help="Cached blocks of each instance.")]
SecondsOption = Annotated[float, typer.Option(min=0.5, max=600, help="Seconds of calls a side and variant.")]


@app.callback(invoke_without_command=True)
def every(context: typer.Context, json: JsonOption = None) -> None:
    """All benchmarks with their defaults, within eight minutes."""
    if context.invoked_subcommand is not None:
        return
    console = _console(json)
    figures = _route(console, RouteOptions(), decisions_only=False)
    figures |= _rebalance(console, PAPER_BLOCKS) | _memory(console, PAPER_BLOCKS, _MEMORY_DECISIONS)
    write(json, console, figures)


@app.command()
def route(
    instances: InstancesOption = 8,
    blocks: BlocksOption = PAPER_BLOCKS,
    seconds: SecondsOption = 3.0,
    alone: Annotated[bool, typer.Option("--alone", help="The decision alone, in process: no server.")] = False,
    json: JsonOption = None,
) -> None:
    """A router over a full view beside an empty call, in turns; then the decision alone."""
    console = _console(json)
    options = RouteOptions(View(instances, blocks), seconds)
    write(json, console, _route(console, options, decisions_only=alone))


@app.command()
def rebalance(blocks: BlocksOption = PAPER_BLOCKS, json: JsonOption = None) -> None:
    """The plan of a round, in process."""
    console = _console(json)
    write(json, console, _rebalance(console, blocks))


@app.command()
def memory(
    blocks: BlocksOption = PAPER_BLOCKS,
    decisions: Annotated[int, typer.Option(min=1_000, help="Decisions under churn.")] = _MEMORY_DECISIONS,
    json: JsonOption = None,
) -> None:
    """Bytes a cached block, and whether decisions under churn leave anything behind."""
    console = _console(json)
    write(json, console, _memory(console, blocks, decisions))


def _console(json: Path | None) -> Console:
    """Tables go to stderr where stdout is asked for JSON."""
    console = Console(stderr=str(json) == "-", highlight=False)
    # Cut columns say nothing; a narrow terminal wraps the lines instead.
    console.width = max(console.width, _WIDTH)
    return console


def _route(console: Console, options: RouteOptions, *, decisions_only: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if not decisions_only:
        figures = _route_calls(console, options)
    with console.status("the decision alone"):
        alone = decisions(options.view.blocks, _DECISIONS)
    console.print(_decision_table(alone))
    return figures | {"decision_alone": alone}


def _route_calls(console: Console, options: RouteOptions) -> dict[str, Any]:
    rows: list[Comparison] = []
    with console.status("router and empty server start") as status:
        for row in route_rows(options, status.update):
            rows.append(row)
            console.print(f"{row.variant}: p50 x{row.ratios[0]:.2f} of the {row.against_name}", style="dim")
        status.update("quiet and churning view")
        rows.append(churn_against_quiet(options))
        status.update("workers")
        rows.append(workers_row(options))
        status.update("overload")
        flood = overload(options)
    about = machine()
    view = options.view
    title = (
        f"Route, {view.instances} instances x {view.blocks:,} blocks "
        f"({about['cores']} cores, load {about['load_average_1min']})"
    )
    console.print(comparison_table(title, rows))
    console.print(_overload_table(flood))
    return {"route": rows, "overload": flood}


def _rebalance(console: Console, blocks: int) -> dict[str, Any]:
    with console.status("rebalance plans"):
        figures = [plans(8, 64, blocks, 100), plans(64, 64, blocks, 12)]
    table = Table(title="Rebalance plan, one round", title_justify="left")
    for name in (
        "instances x waiting",
        "ms p50",
        "p99",
        "best",
        "x look-ups and a sort",
        "ms a waiting request",
        "moves",
    ):
        table.add_column(name, justify="right")
    for one in figures:
        table.add_row(*_plan_cells(one))
    console.print(table)
    return {"rebalance": figures}


def _plan_cells(plan: PlanFigures) -> Sequence[str]:
    each = plan.p50_ms / plan.listed
    name = f"{plan.instances} x {plan.waiting}"
    return (
        name,
        f"{plan.p50_ms:.2f}",
        f"{plan.p99_ms:.2f}",
        f"{plan.best_ms:.2f}",
        f"{plan.ratio:.2f}",
        f"{each:.4f}",
        str(plan.moves),
    )


def _memory(console: Console, blocks: int, count: int) -> dict[str, Any]:
    with console.status("memory"):
        held = block_memory(blocks)
        churned = decision_memory(count, blocks=blocks)
    console.print(_memory_table(held, churned))
    return {"block_memory": held, "decision_memory": churned, "decision_memory_growth": churned.growth}


def _memory_table(held: BlockMemory, churned: DecisionMemory) -> Table:
    table = Table(title="Memory", title_justify="left", show_header=False)
    table.add_row("bytes a block, filled", f"{held.bytes_a_block:.1f}")
    table.add_row("after doubling by single changes", f"{held.after_single_growth:.1f}")
    table.add_row("after doubling by batches", f"{held.after_batch_growth:.1f}")
    table.add_row(f"an instance of {held.blocks:,} blocks", f"{held.kib_an_instance:.0f} KiB")
    start, end = churned.rss_start / 2**20, churned.rss_end / 2**20
    table.add_row(
        f"{churned.decisions:,} decisions with churn", f"{start:.1f} -> {end:.1f} MiB resident, x{churned.growth:.3f}"
    )
    return table


def _decision_table(figures: Sequence[DecisionFigures]) -> Table:
    table = Table(title="The decision alone (chain, choose, book), in process", title_justify="left")
    table.add_column("variant")
    for name in ("µs p50", "p99", "x the first", "instances looked at"):
        table.add_column(name, justify="right")
    for one in figures:
        share = one.p50_us / figures[0].p50_us
        table.add_row(one.name, f"{one.p50_us:.1f}", f"{one.p99_us:.1f}", f"{share:.2f}", f"{one.mean_looks:.1f}")
    return table


def _overload_table(flood: Overload) -> Table:
    table = Table(title="Overload: a caller at 300/s beside a flood of twice the saturation", title_justify="left")
    table.add_column("")
    for name in ("ms p50", "p99", "x quiet p99", "served", "refused", "failed"):
        table.add_column(name, justify="right")
    for name, one in (("quiet", flood.quiet), ("in the flood", flood.under), ("after", flood.after)):
        share = one.p99_ms / flood.quiet.p99_ms if flood.quiet.p99_ms else 0.0
        table.add_row(
            name,
            f"{one.p50_ms:.2f}",
            f"{one.p99_ms:.2f}",
            f"{share:.2f}",
            *map(str, (one.calls, one.refused, one.failed)),
        )
    table.caption = (
        f"saturation {flood.saturation_rate:,.0f}/s, the flood {flood.flood_rate:,.0f}/s, of it served "
        f"{flood.flood_served:,.0f}/s; "
        f"served as before {flood.recovered_s:.2f} s after it ended"
    )
    return table
