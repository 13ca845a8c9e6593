"""`dualmap replay TRACE`: every request of a trace through Router.Route and the chosen agent's Submit, open loop.

Inside the cluster all is wall time: gaps, costs, the objective and waits are divided by ``--speed`` going in, times are
multiplied by it coming out. Periods are divided too, but not below 20 ms; leases are not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.processes import StartError
from dualmap.cli.replay_prompts import PromptForm
from dualmap.cli.replay_report import Outcome, ReplayFacts, ReplayReport
from dualmap.cli.replay_sender import DualMapSender, Pace, RoundRobinSender, Sender, send_all
from dualmap.client import Address, ClientOptions, DualMapClient
from dualmap.core.errors import InvalidRequest
from dualmap.rpc.health_calls import wait_serving
from dualmap.runtime.telemetry import Telemetry, start_telemetry
from dualmap.simulator.arrivals import capacity_bound, own_arrivals, poisson_arrivals
from dualmap.simulator.trace import OverLong, TraceError, TraceRequest, read_trace

Policy = Literal["dualmap", "round_robin"]

REQUEST_TIMEOUT_S = 900.0
"""Trace seconds one request may take, second routes after a full queue included: far beyond any that is served."""

ANSWER_TIMEOUT_S = 5.0
"""Wall seconds a running cluster's routers get to say that they serve."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to send and how fast."""

    local: LocalOptions
    rate: float | None = None
    seed: int = 1
    policy: Policy = "dualmap"
    prompts: PromptForm = "ids"

    @property
    def pace(self) -> Pace:
        """Pace of the sends; ids are new in each run so that no router takes them for repetitions."""
        return Pace(self.local.speed, REQUEST_TIMEOUT_S, f"replay-{time.time_ns():x}", self.prompts)


def replay(  # noqa: PLR0917  (each is an option of the command)
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, Azure CSV or agentic sessions; plain or gzip.")],
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-3, help="Poisson arrivals a second; absent: own timing.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, max=100, help="Trace seconds in a wall second.")] = 1.0,
    instances: Annotated[int | None, typer.Option(min=1, max=64, help="Instances of the own cluster (4).")] = None,
    max_input: Annotated[int | None, typer.Option(min=1, help="Longest prompt in tokens.")] = None,
    over_long: Annotated[OverLong, typer.Option(help="A longer prompt is cut or its request skipped.")] = "cut",
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    routers: Annotated[str | None, typer.Option(help="host:port,… of a running cluster instead of an own one.")] = None,
    skip_bad: Annotated[bool, typer.Option(help="Count wrong lines and go on.")] = False,
    policy: Annotated[Policy, typer.Option(help="round_robin: to the agents in turn, without routers.")] = "dualmap",
    queue_policy: Annotated[str, typer.Option(help="slo, hit_first or fifo.")] = "slo",
    binding: Annotated[str, typer.Option(help="early or late.")] = "early",
    start_depth: Annotated[int, typer.Option(min=1, max=64, help="Blocks of the shortest key.")] = 2,
    rebalance: Annotated[bool, typer.Option(help="Whether a rebalancer runs.")] = True,
    prompts: Annotated[PromptForm, typer.Option(help="tokens: made up from the ids, as a real engine needs.")] = "ids",
    local_routers: Annotated[int, typer.Option(min=1, max=8, help="Routers of the own cluster.")] = 1,
) -> None:
    """Replay a trace and print what came of it."""
    if routers is not None and (instances is not None or speed != 1.0 or policy != "dualmap"):
        wrong = "instances" if instances is not None else "speed" if speed != 1.0 else "policy"
        raise InvalidRequest(f"--{wrong}", "contradicts --routers: that cluster is as it is")
    if json is not None and (json.is_dir() or not os.access(json if json.exists() else json.parent, os.W_OK)):
        # Now, not after an hour's replay.
        raise InvalidRequest("--json", f"{json} cannot be written")
    skipped: list[TraceError] = []
    requests = read_trace(trace, limit, max_input, over_long, skip_bad, skipped.append)
    local = LocalOptions(
        instances=instances or 4,
        routers=local_routers,
        speed=speed,
        start_depth=start_depth,
        rebalance=rebalance,
        queue_policy=queue_policy,
        binding=binding,
    )
    options = ReplayOptions(local, rate, seed, policy, prompts)
    console = Console()
    for error in skipped[:10]:
        console.print(f"skipped {error}", style="yellow", highlight=False)
    if skipped:
        console.print(f"{len(skipped)} wrong lines skipped", style="yellow")
    arrivals = arrivals_of(requests, options)
    if routers is None:
        report = asyncio.run(replay_locally(arrivals, options, console))
    else:
        addresses = [address.strip() for address in routers.split(",") if address.strip()]
        report = asyncio.run(replay_at(arrivals, options, addresses, console))
    report.print_table(console)
    if json is not None:
        report.write_json(json)


def arrivals_of(requests: Sequence[TraceRequest], options: ReplayOptions) -> list[TraceRequest]:
    """The requests at the times they are to be sent: Poisson at a rate, or the trace's own."""
    if options.rate is not None:
        return poisson_arrivals(requests, options.rate, options.seed)
    return own_arrivals(requests, seed=options.seed)


async def replay_locally(requests: Sequence[TraceRequest], options: ReplayOptions, console: Console) -> ReplayReport:
    """Replay on a cluster of this machine that lives as long as the replay."""
    with console.status(f"starting {options.local.instances} instances"):
        cluster = LocalCluster(options.local)
        await cluster.__aenter__()
    try:
        return await replay_on(cluster, requests, options, console)
    finally:
        await cluster.__aexit__(None, None, None)


async def replay_on(
    cluster: LocalCluster, requests: Sequence[TraceRequest], options: ReplayOptions, console: Console
) -> ReplayReport:
    """Replay on a cluster that was started already."""
    async with _client(cluster.router_addresses, options) as client:
        sender: Sender = DualMapSender(client)
        if options.policy == "round_robin":
            members = (await cluster.ring()).members
            sender = RoundRobinSender(client, [Address(m.instance_id, m.grpc_address, m.http_address) for m in members])
        return await _run(requests, options, sender, console)


async def replay_at(
    requests: Sequence[TraceRequest], options: ReplayOptions, routers: Sequence[str], console: Console
) -> ReplayReport:
    """Replay on a cluster that runs elsewhere. Raises StartError when none of its routers serves."""
    waits = [wait_serving(router, ANSWER_TIMEOUT_S) for router in routers]
    if all(await asyncio.gather(*waits, return_exceptions=True)):
        raise StartError(f"--routers: none of {', '.join(routers) or 'no address'} serves")
    telemetry = start_telemetry("client")
    try:
        async with _client(routers, options, telemetry) as client:
            report = await _run(requests, options, DualMapSender(client), console)
    finally:
        telemetry.shutdown()
    # Nothing is known of that cluster but what its answers said.
    report.facts = replace(
        report.facts, instances=0, cost="", poll_ms=0, rebalance_ms=0, start_depth=0, bound_rate=None
    )
    return report


def _client(routers: Sequence[str], options: ReplayOptions, telemetry: Telemetry | None = None) -> DualMapClient:
    tracer = telemetry.tracer("dualmap.client") if telemetry is not None and telemetry.enabled else None
    return DualMapClient(routers, ClientOptions(timeout_s=options.pace.timeout_s / options.local.speed), tracer)


async def _run(
    requests: Sequence[TraceRequest], options: ReplayOptions, sender: Sender, console: Console
) -> ReplayReport:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    start_s = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(options.policy, total=len(requests))

        def ended(_outcome: Outcome) -> None:
            progress.advance(bar)

        outcomes = await send_all(requests, sender, options.pace, ended)
    seconds = time.monotonic() - start_s
    return ReplayReport(facts_of(requests, options, seconds), outcomes)


def facts_of(requests: Sequence[TraceRequest], options: ReplayOptions, seconds: float) -> ReplayFacts:
    """What the replay ran with; periods in trace time."""
    local = options.local
    cost = local.cost
    return ReplayFacts(
        slo_s=local.ttft_slo_ms / 1_000,
        speed=local.speed,
        poll_ms=local.period_ms(local.poll_ms) * local.speed,
        rebalance_ms=local.period_ms(local.rebalance_ms) * local.speed if local.rebalance else 0.0,
        start_depth=local.start_depth,
        policy=options.policy,
        seconds=seconds,
        bound_rate=capacity_bound(requests, local.instances, cost),
        rate=options.rate,
        cost=f"a prefill costs {cost.a_s * 1e3:g} ms + {cost.b_s_per_token * 1e3:g} ms an uncached token",
        instances=local.instances,
    )
