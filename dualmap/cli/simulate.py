"""`dualmap simulate`: the production decisions in virtual time on a trace: runs, goodput, the paper's comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from dualmap.cli import simulate_options as given
from dualmap.simulator.goodput import SEEDS, START_SHARE, GoodputFigure, Trial, goodputs, worker_pool
from dualmap.simulator.registry import PEERS, installed
from dualmap.simulator.report import Measures
from dualmap.simulator.study import (
    Arrivals,
    ContradictionError,
    WorkloadChoice,
    ceilings,
    goodput_json,
    means,
    runs,
    runs_json,
)
from dualmap.simulator.trace import TraceError


class _RunByDefault(TyperGroup):
    """``dualmap simulate --trace F`` is ``dualmap simulate run --trace F``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="Compare routing policies in virtual time.", cls=_RunByDefault, no_args_is_help=True)
_console = Console(stderr=True)


@contextmanager
def _progress(total: int, what: str) -> Iterator[Progress]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(f"[bold]{what}", *columns, console=_console, transient=True) as progress:
        progress.add_task(what, total=total)
        yield progress


def _skipped(error: TraceError) -> None:
    _console.print(f"skipped: {error}", highlight=False)


def _write(path: str | None, value: dict[str, object]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(value, indent=1, allow_nan=True) + "\n", encoding="utf-8")


def _workload(  # noqa: PLR0917 - the commands' options
    trace: str | None,
    synthetic: str | None,
    limit: int | None,
    max_input: int,
    over_long: str,
    skip_bad: bool,
    warmup: int,
) -> WorkloadChoice:
    if over_long not in ("cut", "skip"):
        raise ContradictionError(f"--over-long: {over_long!r} is neither cut nor skip")
    return WorkloadChoice(trace, synthetic, limit, max_input, "cut" if over_long == "cut" else "skip", skip_bad, warmup)


def _show_runs(found: dict[str, list[Measures]]) -> None:
    table = Table("policy", "in SLO", "fair", "hit", "CV", "p50 s", "p90 s", "p99 s", "seeds' range")
    for label, measures in found.items():
        mean = means(measures)
        low, high = min(one.attainment for one in measures), max(one.attainment for one in measures)
        cells = [f"{mean[name]:.3f}" for name in ("attainment", "fair_attainment", "hit_rate", "load_cv")]
        cells += [f"{mean[name]:.2f}" for name in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")]
        table.add_row(label, *cells, f"{low:.3f} to {high:.3f}")
    Console().print(table)


def _show_goodput(figures: Sequence[GoodputFigure], limits: dict[str, float]) -> None:
    table = Table("policy", "goodput req/s", "seeds' range", title=f"bound {limits['bound']:.1f} req/s")
    for figure in figures:
        low, high = figure.spread
        table.add_row(figure.label, f"{figure.goodput:.2f}", f"{low:.2f} to {high:.2f}")
    Console().print(table)


@app.command("run")
def run(  # noqa: PLR0917 - options of a command
    trace: given.TracePath = None,
    synthetic: given.Synthetic = None,
    limit: given.Limit = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Arrivals a second.")] = None,
    own_timing: Annotated[bool, typer.Option("--own-timing", help="The trace's own times instead of Poisson.")] = False,
    keep_bursts: Annotated[bool, typer.Option("--keep-bursts", help="Own timing: keep each tick's burst.")] = False,
    policies: given.Policies = "dualmap,min_ttft,cache_affinity,least_loaded",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, seeds 1 to this.")] = 1,
    max_input: given.MaxInput = 20_480,
    over_long: given.OverLongOption = "cut",
    skip_bad: given.SkipBad = False,
    warmup: given.Warmup = 500,
    instances: given.Instances = 8,
    slo_s: given.Slo = 5.0,
    model: given.ModelOption = given.Model.SEVEN,
    queue: given.QueueOption = None,
    binding: given.BindingOption = given.Binding.LATE,
    rebalance: given.RebalanceOption = True,
    select: given.SelectOption = given.Rule.DUALMAP,
    choices: given.Choices = 2,
    heat: given.Heat = True,
    escape: given.Escape = True,
    as_built: given.AsBuilt = False,
    poll_ms: given.PollMs = None,
    message_ms: given.MessageMs = None,
    routers: given.Routers = None,
    bookings: given.Bookings = True,
    fit_cost: given.FitCost = False,
    slowdown_term: given.SlowdownTerm = True,
    start_depth: given.StartDepth = 1,
    rebalance_ms: given.RebalanceMs = None,
    heat_ms: given.HeatMs = None,
    kv_tokens: given.KvTokens = 1_200_000,
    host_tokens: given.HostTokens = 0,
    host_load_us: given.HostLoadUs = None,
    speeds: given.Speeds = "",
    decode_rate: given.DecodeRate = 50.0,
    decode_slowdown: given.DecodeSlowdown = 0.01,
    prefill_slowdown: given.PrefillSlowdown = 0.0,
    timetable: given.Timetable = "",
    workers: given.Workers = 0,
    json_out: given.JsonOut = None,
    plots: Annotated[str | None, typer.Option(help="Write plots (SVG) into this folder.")] = None,
) -> None:
    """Run policies at one arrival rate and show the measures."""
    workload = _workload(trace, synthetic, limit, max_input, over_long, skip_bad, warmup).load(_skipped)
    arrivals = Arrivals(rate, own_timing, keep_bursts)
    arrivals.times(workload.requests[:2], 1)
    periods = given.Periods(poll_ms, message_ms, routers, rebalance_ms, heat_ms)
    controls = given.learning(
        given.control(as_built, periods, rebalance, heat, bookings, fit_cost), slowdown_term, start_depth
    )
    built = given.engine(model, kv_tokens, host_tokens, host_load_us, decode_rate, decode_slowdown, prefill_slowdown)
    options = replace(
        given.cluster(instances, slo_s, built, queue, binding, controls),
        speeds=given.speeds(speeds, instances),
        choose=given.choosing(select, choices, escape),
        timetable=given.timetable(timetable),
    )
    names = given.policy_names(policies)
    given.check_choosing(names, select, choices, escape)
    given.check_timetable(names, options.timetable, instances)
    trials = [Trial(name, name, options) for name in names]
    with worker_pool((), workers) as pool, _progress(len(trials) * seeds, "runs") as bar:
        found = runs(pool, workload, arrivals, trials, range(1, seeds + 1), lambda: bar.advance(bar.task_ids[0]))
    _show_runs(found)
    limits = ceilings(workload, instances, options.engine.cost)
    _write(json_out, runs_json(workload, found, limits))
    if plots is not None:
        from dualmap.simulator.plots import draw_runs  # noqa: PLC0415 - matplotlib is slow to import

        draw_runs(Path(plots), found)


@app.command("goodput")
def goodput(  # noqa: PLR0917 - options of a command
    trace: given.TracePath = None,
    synthetic: given.Synthetic = None,
    limit: given.Limit = None,
    policies: given.Policies = "dualmap,min_ttft,dualmap_released",
    attainment: Annotated[float, typer.Option(min=0.01, max=0.999, help="Share within the objective.")] = 0.9,
    fair: Annotated[bool, typer.Option("--fair", help="Every quartile of prompt length must attain it.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=len(SEEDS), help="Of the fixed seeds, the first so many.")] = len(
        SEEDS
    ),
    max_input: given.MaxInput = 20_480,
    over_long: given.OverLongOption = "cut",
    skip_bad: given.SkipBad = False,
    warmup: given.Warmup = 500,
    instances: given.Instances = 8,
    slo_s: given.Slo = 5.0,
    model: given.ModelOption = given.Model.SEVEN,
    queue: given.QueueOption = None,
    binding: given.BindingOption = given.Binding.LATE,
    rebalance: given.RebalanceOption = True,
    select: given.SelectOption = given.Rule.DUALMAP,
    choices: given.Choices = 2,
    heat: given.Heat = True,
    escape: given.Escape = True,
    as_built: given.AsBuilt = False,
    poll_ms: given.PollMs = None,
    message_ms: given.MessageMs = None,
    routers: given.Routers = None,
    bookings: given.Bookings = True,
    fit_cost: given.FitCost = False,
    slowdown_term: given.SlowdownTerm = True,
    start_depth: given.StartDepth = 1,
    rebalance_ms: given.RebalanceMs = None,
    heat_ms: given.HeatMs = None,
    kv_tokens: given.KvTokens = 1_200_000,
    host_tokens: given.HostTokens = 0,
    host_load_us: given.HostLoadUs = None,
    speeds: given.Speeds = "",
    decode_rate: given.DecodeRate = 50.0,
    decode_slowdown: given.DecodeSlowdown = 0.01,
    prefill_slowdown: given.PrefillSlowdown = 0.0,
    workers: given.Workers = 0,
    json_out: given.JsonOut = None,
) -> None:
    """The highest Poisson rate at which enough requests are in time: bisection to 1 %, mean of the fixed seeds."""
    workload = _workload(trace, synthetic, limit, max_input, over_long, skip_bad, warmup).load(_skipped)
    periods = given.Periods(poll_ms, message_ms, routers, rebalance_ms, heat_ms)
    controls = given.learning(
        given.control(as_built, periods, rebalance, heat, bookings, fit_cost), slowdown_term, start_depth
    )
    built = given.engine(model, kv_tokens, host_tokens, host_load_us, decode_rate, decode_slowdown, prefill_slowdown)
    options = replace(
        given.cluster(instances, slo_s, built, queue, binding, controls),
        speeds=given.speeds(speeds, instances),
        choose=given.choosing(select, choices, escape),
    )
    limits = ceilings(workload, instances, options.engine.cost)
    names = given.policy_names(policies)
    given.check_choosing(names, select, choices, escape)
    trials = [Trial(name, name, options) for name in names]
    start = limits["bound"] * START_SHARE
    with worker_pool((workload,), workers) as pool, _progress(len(trials) * seeds, "bisections") as bar:
        figures = goodputs(
            pool,
            workload.name,
            trials,
            attainment,
            fair,
            start,
            SEEDS[:seeds],
            lambda: bar.advance(bar.task_ids[0]),
        )
    _show_goodput(figures, limits)
    _write(json_out, goodput_json(workload, figures, limits, attainment, fair))


@app.command("paper")
def paper(  # noqa: PLR0917 - options of a command
    conversation: Annotated[str, typer.Option(help="Mooncake's conversation trace.")],
    toolagent: Annotated[
        str, typer.Option(help="Mooncake's tool and agent trace, or the hybrid that stands in for it.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Short traces, one seed: minutes, and other figures.")] = False,
    only: Annotated[str, typer.Option(help="Only these sections, by comma.")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=len(SEEDS), help="Of the fixed seeds, the first so many.")] = len(
        SEEDS
    ),
    out: Annotated[str, typer.Option(help="Folder of the results.")] = "docs/results/simulator",
    kept: Annotated[
        str | None, typer.Option(help="Results are kept there as they come; a call that was stopped goes on from it.")
    ] = None,
    keep_older: Annotated[
        bool, typer.Option("--keep-older", help="Take kept results of other code too, where decisions did not change.")
    ] = False,
    workers: given.Workers = 0,
) -> None:
    """Run the paper's comparisons and write tables, JSON and plots; stopped, the same call goes on where it was."""
    from dualmap.simulator.kept import Kept, Runner  # noqa: PLC0415 - for this command alone
    from dualmap.simulator.paper import write_paper  # noqa: PLC0415 - matplotlib is slow to import
    from dualmap.simulator.paper_desk import Extent  # noqa: PLC0415
    from dualmap.simulator.paper_sections import CONVERSATION, HYBRID, SECTIONS  # noqa: PLC0415

    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(SECTIONS)
    for name in wanted:
        if name not in SECTIONS:
            raise ContradictionError(f"--only: {name!r} is none of {', '.join(SECTIONS)}")
    chosen = ((CONVERSATION, conversation, 4_500), (HYBRID, toolagent, 5_000))
    choices = [
        (name, WorkloadChoice(path, limit=1_000, warmup=200) if quick else WorkloadChoice(path, limit=limit))
        for name, path, limit in chosen
    ]
    workloads = [replace(choice.load(_skipped), name=name) for name, choice in choices]
    count = 1 if quick else seeds
    command = "dualmap simulate paper" + (" --quick" if quick else "") + (f" --seeds {seeds}" if seeds != 5 else "")
    command += f" --only {','.join(wanted)}" if only else ""
    command += f" --conversation {Path(conversation).name} --toolagent {Path(toolagent).name}"
    file = Kept(Path(kept) if kept is not None else Path(out) / "kept.jsonl", older=keep_older)
    peers = () if quick else tuple(name for name in PEERS if installed(name))
    with worker_pool(workloads, workers) as pool, _progress(1, "paper") as bar:
        runner = Runner(pool, workloads, file)

        def show() -> None:
            bar.update(bar.task_ids[0], total=runner.jobs, completed=runner.finished())

        runner.on_done = show
        write_paper(runner, workloads, Path(out), Extent(wanted, quick, SEEDS[:count], peers), command, show)
    if file.of_other_code:
        _console.print(f"{file.of_other_code} kept results of other code were taken", highlight=False)
    _console.print(f"written to {out}", highlight=False)
