"""`dualmap chaos`: kill and pause every part of an own cluster in random order under load; what broke, and its seed.

Only processes that it started are hurt; everything listens on loopback.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualmap.cli.chaos_plan import PlanOptions
from dualmap.cli.chaos_run import ChaosOptions, SeedResult, run_seed
from dualmap.cli.replay_report import quantile

AIM_ROUTE_P99_MS = 5.0


def chaos(  # noqa: PLR0917  (each is an option of the command)
    seed: Annotated[int | None, typer.Option(help="Replay this seed alone.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1_000, help="Seeds to try.")] = 8,
    first_seed: Annotated[int | None, typer.Option(help="Seeds from this on; absent: random ones.")] = None,
    minutes: Annotated[float, typer.Option(min=0.5, max=600, help="No seed is begun that may end later.")] = 11.5,
    faults: Annotated[int, typer.Option(min=1, max=200, help="Faults of a seed.")] = 12,
    rate: Annotated[float, typer.Option(min=0.1, max=200, help="Requests a second.")] = 12.0,
    instances: Annotated[int, typer.Option(min=2, max=16, help="Agents with simulated engines.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Hurt every part at random under load and check that callers notice nothing. Exit code 1 when a promise broke."""
    console = Console()
    options = ChaosOptions(PlanOptions(faults=faults), instances, rate)
    results = asyncio.run(_run(_seeds(seed, seeds, first_seed), options, minutes * 60, console))
    print_report(results, console)
    if json is not None:
        json.write_text(jsonlib.dumps(figures(results), indent=2, sort_keys=True) + "\n")
    failing = [result.seed for result in results if result.problems]
    if failing:
        again = f"dualmap chaos --seed {failing[0]} --faults {faults} --rate {rate:g} --instances {instances}"
        console.print(f"failing seeds: {failing}; again: {again}", style="bold red", highlight=False)
        raise typer.Exit(1)


def _seeds(seed: int | None, count: int, first: int | None) -> list[int]:
    if seed is not None:
        return [seed]
    if first is not None:
        return list(range(first, first + count))
    return [random.randrange(1, 1 << 31) for _ in range(count)]


async def _run(seeds: Sequence[int], options: ChaosOptions, budget_s: float, console: Console) -> list[SeedResult]:
    began_s = time.monotonic()
    longest_s = 0.0
    results: list[SeedResult] = []
    for seed in seeds:
        if results and time.monotonic() - began_s + 1.2 * longest_s > budget_s:
            console.print(f"{len(seeds) - len(results)} seeds left out: the time is over")
            break
        console.print(f"seed {seed}", style="bold", highlight=False)
        result = await run_seed(seed, options, lambda line: console.print(line, highlight=False))
        longest_s = max(longest_s, result.seconds)
        results.append(result)
        console.print(_summary(result), highlight=False, style="red" if result.problems else "green")
        for problem in result.problems:
            console.print(f"  {problem}", style="red", highlight=False)
    return results


def _summary(result: SeedResult) -> str:
    agreed = f"{result.agreed_after_s:.2f} s" if result.agreed_after_s is not None else "never"
    return (
        f"seed {result.seed}: {len(result.seen)} requests, {sum(seen.attempts > 1 for seen in result.seen)} second "
        f"attempts, {sum(bool(seen.error) for seen in result.seen)} broken after they began, views equal after "
        f"{agreed}, {len(result.problems)} problems, {result.seconds:.0f} s"
    )


def figures(results: Sequence[SeedResult]) -> dict[str, object]:
    """What was measured over all seeds; times in the units their names say."""
    seen = [one for result in results for one in result.seen]
    probes = [probe for result in results for probe in result.untouched()]
    route = sorted(probe.took_s for probe in probes if probe.took_s is not None)
    empty = sorted(probe.release_s for probe in probes if probe.release_s is not None)
    agreed = [result.agreed_after_s for result in results if result.agreed_after_s is not None]
    return {
        "seeds": [result.seed for result in results],
        "failing_seeds": [result.seed for result in results if result.problems],
        "requests": len(seen),
        "done": sum(one.done for one in seen),
        "broken_after_they_began": sum(bool(one.error) and one.begun for one in seen),
        "second_attempts": sum(one.attempts > 1 for one in seen),
        "handovers": sum(one.handovers for one in seen),
        "route_at_untouched_routers": len(route),
        "route_p50_ms": quantile(route, 0.50, 1_000),
        "route_p99_ms": quantile(route, 0.99, 1_000),
        "empty_call_p50_ms": quantile(empty, 0.50, 1_000),
        "empty_call_p99_ms": quantile(empty, 0.99, 1_000),
        "views_equal_after_s_worst": max(agreed, default=None),
        "drained_after_s_worst": max((result.drained_after_s for result in results), default=0.0),
        "recovery_s": _recovery_figures(results, alone=True),
        "recovery_s_amid_other_faults": _recovery_figures(results, alone=False),
        "problems": [f"seed {result.seed}: {problem}" for result in results for problem in result.problems],
    }


def _recovery_figures(results: Sequence[SeedResult], *, alone: bool) -> dict[str, object]:
    return {
        name: {"faults": len(times), "median": quantile(times, 0.5), "worst": times[-1]}
        for name, times in recoveries(results, alone=alone).items()
    }


def recoveries(results: Sequence[SeedResult], *, alone: bool) -> dict[str, list[float]]:
    """Ascending recovery times by kind of fault, of those that no other fault touched, or of those that one did."""
    found: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for hurt in result.hurts:
            if hurt.recovery_s is not None and hurt.alone(result.hurts) is alone:
                found[f"{hurt.fault.act} {hurt.fault.role}"].append(hurt.recovery_s)
    return {name: sorted(times) for name, times in sorted(found.items())}


def print_report(results: Sequence[SeedResult], console: Console) -> None:
    """The figures as tables."""
    measured = figures(results)
    table = Table(title="chaos")
    table.add_column("figure")
    table.add_column("", justify="right")
    for key in (
        "requests",
        "done",
        "broken_after_they_began",
        "second_attempts",
        "handovers",
        "route_at_untouched_routers",
        "route_p50_ms",
        "route_p99_ms",
        "empty_call_p50_ms",
        "empty_call_p99_ms",
        "drained_after_s_worst",
        "views_equal_after_s_worst",
    ):
        value = measured[key]
        table.add_row(key.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value))
    console.print(table)
    times = Table(title="recovery: from a part's return, or for a leader from its loss, until all is seen or led again")
    for column in ("fault", "other faults", "times", "median s", "worst s"):
        times.add_column(column, justify="left" if "fault" in column else "right")
    for alone in (True, False):
        for name, ascending in recoveries(results, alone=alone).items():
            middle = quantile(ascending, 0.5) or 0.0
            row = (name, "none" if alone else "some", str(len(ascending)), f"{middle:.2f}", f"{ascending[-1]:.2f}")
            times.add_row(*row)
    console.print(times)
    p99 = measured["route_p99_ms"]
    if isinstance(p99, float) and p99 > AIM_ROUTE_P99_MS:
        console.print(
            f"Route p99 at untouched routers is above the aim of {AIM_ROUTE_P99_MS:g} ms; where an empty call's "
            "(Release, right after each) is too, the machine is too busy to tell",
            style="yellow",
        )
