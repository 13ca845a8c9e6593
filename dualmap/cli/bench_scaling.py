"""`dualmap bench scaling`: a live replay while the pool grows and shrinks again; attainment over time, pairs moved.

An own cluster of this machine; times are trace time unless a name says wall.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.replay_report import Outcome, quantile
from dualmap.cli.replay_sender import DualMapSender, Pace, send_all
from dualmap.client import CallFailed, ClientOptions, DualMapClient
from dualmap.core.membership import InstanceState
from dualmap.core.state import LoadReport
from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.operator_calls import RingOperatorCalls
from dualmap.rpc.state_calls import StateCallError, StateCalls
from dualmap.simulator.arrivals import capacity_bound, poisson_arrivals
from dualmap.simulator.synthetic import synthetic_trace
from dualmap.simulator.trace import TraceRequest

REQUEST_TIMEOUT_S = 900.0
CHANGE_TIMEOUT_S = 60.0
CHANGE_S = 7.0
"""Wall seconds that one join and one drain take on a small machine, for the length of the load."""

_CALL_TIMEOUT_S = 2.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """``few`` to ``many`` instances and back; ``share`` of what ``few`` can take at best is the load all along.

    ``phase_s``: wall seconds before, between and after the changes.
    """

    few: int = 4
    many: int = 8
    share: float = 0.6
    speed: float = 5.0
    phase_s: float = 15.0
    window_s: float = 5.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    """One instance more or less, ``instances`` with it: the share of pairs that it moved.

    ``at_s`` and ``took_s`` in wall seconds, ``left_waiting`` what a drained instance still held when it had left.
    """

    instance: str
    joined: bool
    instances: int
    at_s: float
    took_s: float
    moved_share: float
    left_waiting: int = 0

    @property
    def expected_share(self) -> float:
        """A pair moves where the one instance is in it: as either candidate 1 in n, and never as both."""
        return 2 / self.instances


@dataclass(frozen=True, slots=True)
class Window:
    """Requests sent within some wall seconds."""

    at_s: float
    requests: int
    attainment: float
    hit_rate: float
    ttft_p90_s: float | None


@dataclass(slots=True)
class ScalingFigures:
    """What came of it."""

    changes: list[Change] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    handovers: int = 0
    errors: list[str] = field(default_factory=list)

    def moved_against_expected(self, *, joined: bool) -> float:
        """Mean moved share of the joins or of the leaves over the mean expected."""
        changes = [change for change in self.changes if change.joined is joined]
        return sum(change.moved_share for change in changes) / sum(change.expected_share for change in changes)


async def scale_live(options: ScalingOptions) -> ScalingFigures:
    """Replay, grow, shrink, and measure. Raises StartError, TimeoutError when a change does not come about."""
    figures = ScalingFigures()
    local = LocalOptions(instances=options.few, speed=options.speed)
    async with LocalCluster(local) as cluster:
        began_s = time.monotonic()
        arrivals = _arrivals(cluster, options)
        sending = asyncio.create_task(_send(cluster, arrivals, options))
        try:
            await asyncio.sleep(options.phase_s)
            for number in range(options.few + 1, options.many + 1):
                figures.changes.append(await _join(cluster, number, began_s))
            await asyncio.sleep(options.phase_s)
            for number in range(options.many, options.few, -1):
                figures.changes.append(await _drain(cluster, number, began_s))
            outcomes = await sending
        finally:
            sending.cancel()
    sent_at_s = [request.timestamp_s / options.speed for request in arrivals]
    figures.windows = _windows(outcomes, sent_at_s, options.window_s, local.ttft_slo_ms / 1_000)
    figures.requests = len(outcomes)
    failed = [outcome for outcome in outcomes if outcome.status != "done"]
    figures.failed = len(failed)
    figures.errors = sorted({outcome.error for outcome in failed})
    figures.handovers = sum(outcome.handovers for outcome in outcomes)
    return figures


def _arrivals(cluster: LocalCluster, options: ScalingOptions) -> list[TraceRequest]:
    wall_s = 3 * options.phase_s + CHANGE_S * (options.many - options.few)
    some = synthetic_trace("skew", 2_000, options.seed)
    rate = options.share * capacity_bound(some, options.few, cluster.options.cost)
    trace = synthetic_trace("skew", round(1.2 * rate * wall_s * options.speed) + 50, options.seed)
    timed = poisson_arrivals(trace, rate, options.seed)
    return [request for request in timed if request.timestamp_s <= wall_s * options.speed]


async def _send(cluster: LocalCluster, arrivals: Sequence[TraceRequest], options: ScalingOptions) -> list[Outcome]:
    pace = Pace(options.speed, REQUEST_TIMEOUT_S, f"scaling-{time.time_ns():x}")
    patient = ClientOptions(timeout_s=REQUEST_TIMEOUT_S / options.speed)
    async with DualMapClient(cluster.router_addresses, patient) as client:
        return await send_all(arrivals, DualMapSender(client), pace, lambda _outcome: None)


async def _join(cluster: LocalCluster, number: int, began_s: float) -> Change:
    name = f"agent-{number}"
    at_s = time.monotonic()
    await cluster.start(name)
    async with RingOperatorCalls(cluster.services["ringmanager-1"].address) as calls, asyncio.timeout(CHANGE_TIMEOUT_S):
        while True:
            facts = await calls.ring(_CALL_TIMEOUT_S)
            active = [m.instance_id for m in facts.ring.members if m.state is InstanceState.ACTIVE]
            # The share is measured beside the loop, a moment after the ring is published.
            if f"{name}/0" in active and facts.last_moved_share > 0:
                break
            await asyncio.sleep(_LOOK_S)
        took_s = time.monotonic() - at_s
        await asyncio.sleep(0.5)
        facts = await calls.ring(_CALL_TIMEOUT_S)
    return Change(f"{name}/0", True, number, at_s - began_s, took_s, facts.last_moved_share)


async def _drain(cluster: LocalCluster, number: int, began_s: float) -> Change:
    instance_id = f"agent-{number}/0"
    at_s = time.monotonic()
    load = LoadReport()
    async with (
        RingOperatorCalls(cluster.services["ringmanager-1"].address) as calls,
        StateCalls() as states,
        asyncio.timeout(CHANGE_TIMEOUT_S),
    ):
        drained = await calls.drain(instance_id, _CALL_TIMEOUT_S)
        address = cluster.services[f"agent-{number}"].address
        while True:
            members = {member.instance_id for member in (await calls.ring(_CALL_TIMEOUT_S)).ring.members}
            try:
                query = StateQuery(instance_id, full=True)
                load = (await states.get_state(address, query, _CALL_TIMEOUT_S)).load or load
            except (StateCallError, CallFailed):
                # It has left and ended: what it said last holds.
                if instance_id not in members:
                    break
            if instance_id not in members:
                break
            await asyncio.sleep(_LOOK_S)
    return Change(
        instance_id,
        False,
        number,
        at_s - began_s,
        time.monotonic() - at_s,
        drained.moved_share,
        load.waiting_requests + load.running_requests,
    )


def _windows(outcomes: Sequence[Outcome], sent_at_s: Sequence[float], window_s: float, slo_s: float) -> list[Window]:
    by_window: dict[int, list[Outcome]] = defaultdict(list)
    for outcome, at_s in zip(outcomes, sent_at_s, strict=True):
        by_window[int(at_s / window_s)].append(outcome)
    windows = []
    for number, inside in sorted(by_window.items()):
        ttft = sorted(outcome.ttft_s for outcome in inside if outcome.ttft_s is not None)
        prompt = sum(outcome.prompt_tokens for outcome in inside) or 1
        windows.append(
            Window(
                number * window_s,
                len(inside),
                sum(seconds <= slo_s for seconds in ttft) / len(inside),
                sum(outcome.hit_tokens for outcome in inside) / prompt,
                quantile(ttft, 0.9),
            )
        )
    return windows


def print_scaling(figures: ScalingFigures, console: Console) -> None:
    """Two tables: the changes, and attainment over time."""
    table = Table(title="changes (wall seconds)")
    for column in ("at", "instance", "what", "took", "pairs moved", "expected", "left behind"):
        table.add_column(column, justify="right")
    for change in figures.changes:
        table.add_row(
            f"{change.at_s:.1f}",
            change.instance,
            "joined" if change.joined else "drained",
            f"{change.took_s:.1f}",
            f"{change.moved_share:.3f}",
            f"{change.expected_share:.3f}",
            str(change.left_waiting) if not change.joined else "",
        )
    console.print(table)
    table = Table(title="over time")
    for column in ("wall s", "requests", "attainment", "hit rate", "TTFT p90 s"):
        table.add_column(column, justify="right")
    for window in figures.windows:
        p90 = f"{window.ttft_p90_s:.2f}" if window.ttft_p90_s is not None else "-"
        table.add_row(
            f"{window.at_s:.0f}", str(window.requests), f"{window.attainment:.3f}", f"{window.hit_rate:.3f}", p90
        )
    console.print(table)
    console.print(
        f"{figures.requests} requests, {figures.failed} failed, {figures.handovers} handed over; pairs moved against "
        f"expected: joins {figures.moved_against_expected(joined=True):.3f}, "
        f"drains {figures.moved_against_expected(joined=False):.3f}"
    )


def bench_scaling(  # noqa: PLR0917  (each is an option of the command)
    few: Annotated[int, typer.Option(min=1, max=32, help="Instances before and after.")] = 4,
    many: Annotated[int, typer.Option(min=2, max=64, help="Instances in between.")] = 8,
    share: Annotated[float, typer.Option(min=0.05, max=2, help="Load, of what the few could take at best.")] = 0.6,
    speed: Annotated[float, typer.Option(min=0.1, max=50, help="Trace seconds in a wall second.")] = 5.0,
    phase_s: Annotated[float, typer.Option(min=1, max=600, help="Wall seconds of each phase.")] = 15.0,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """A live replay while the pool grows and shrinks: attainment over time, pairs moved, what drained ones left."""
    figures = asyncio.run(scale_live(ScalingOptions(few, many, share, speed, phase_s)))
    print_scaling(figures, Console())
    if json is not None:
        json.write_text(jsonlib.dumps(asdict(figures), indent=2) + "\n")
