"""`dualmap demo`: the whole system on this machine, doing its main job on an honest load, round robin beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from dualmap.cli.local_cluster import LocalOptions
from dualmap.cli.replay import ReplayOptions, replay_locally
from dualmap.core.state import PrefillCost
from dualmap.simulator.arrivals import capacity_bound, poisson_arrivals
from dualmap.simulator.synthetic import synthetic_trace

BOUND_SHARE = 0.75
"""Load of the demo as a share of what perfect balance with every block computed once could take."""


def demo(
    requests: Annotated[int, typer.Option(min=50, max=10_000, help="Requests to send.")] = 400,
    instances: Annotated[int, typer.Option(min=2, max=16, help="Simulated instances.")] = 4,
    speed: Annotated[float, typer.Option(min=1, max=50, help="Trace seconds in a wall second.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of workload and arrivals.")] = 1,
) -> None:
    """Start everything, route a skewed load with shared prefixes, print the result, stop everything."""
    console = Console()
    trace = synthetic_trace("skew", requests, seed)
    bound = capacity_bound(trace, instances, PrefillCost())
    rate = BOUND_SHARE * bound
    arrivals = poisson_arrivals(trace, rate, seed)
    console.print(
        f"{requests} requests at {rate:.2f} req/s: {BOUND_SHARE:.0%} of the {bound:.2f} req/s that {instances} "
        "instances could take if every block were computed once and the work balanced perfectly"
    )
    local = LocalOptions(instances=instances, speed=speed)
    baseline = replace(local, rebalance=False, queue_policy="fifo")
    ours = asyncio.run(replay_locally(arrivals, ReplayOptions(local, rate, seed), console))
    theirs = asyncio.run(replay_locally(arrivals, ReplayOptions(baseline, rate, seed, "round_robin"), console))
    ours.print_table(console, beside={"round_robin, fifo": theirs})
    figures = ours.figures()
    if figures["failed"] or figures["shed"]:
        console.print("some requests were not served", style="bold red")
        raise typer.Exit(1)
