"""`dualmap bench state`: what the state plane costs at n instances, in CPU seconds by process times, bytes and seconds.

Real Redis (embedded Valkey), collector and router as processes; instances that have state and no engine. Prints
extrapolations only where they are said to be so.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from dualmap.cli.embedded_valkey import EmbeddedValkey
from dualmap.cli.processes import RunningService, ServiceSpec, start_service
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.rpc.operator_calls import RouterOperatorCalls
from dualmap.store.connection import RedisOptions, connect
from dualmap.store.ring_store import RingStore
from dualmap.view.cluster_view import ClusterView
from dualmap.view.follower import Follower

POOL = "bench"
POLLS_PER_S = 250.0
"""Polls a second that two small cores bear with everything else; n is reached by longer periods, never by more.

Fewer leave the machine idle enough to tell a lag; more show what a poll costs a collector that has much to do.
"""

PER_PROCESS = 250
BUSY_LIMIT = 0.7
"""Above it a lag speaks of the machine."""

DESIGN_POLL_S = 0.1
_VIEW_TIMEOUT_S = 20.0
_READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StateLoad:
    """One size. ``changes_per_s``: changed blocks a second and instance; ``blocks``: held by each."""

    instances: int
    blocks: int = 9_362
    changes_per_s: float = 40.0
    seconds: float = 10.0
    polls_per_s: float = POLLS_PER_S

    @property
    def interval_ms(self) -> int:
        """Poll period: the design's 100 ms where the machine bears it."""
        return max(round(DESIGN_POLL_S * 1e3), round(self.instances / self.polls_per_s * 1e3))


@dataclass(frozen=True, slots=True)
class Moment:
    """Counters at one moment: CPU seconds, polls and writes so far, Redis commands."""

    at_s: float
    collector_cpu_s: float
    router_cpu_s: float
    redis_cpu_s: float
    polls: float
    writes: float
    redis_ops: int


@dataclass(frozen=True, slots=True)
class StateFigures:
    """What one size costs. Lags are None where the machine was too busy to tell."""

    instances: int
    blocks: int
    interval_ms: int
    polls_per_s: float
    changes_per_s: float
    collector_cpu_ms_per_poll: float
    router_cpu_ms_per_entry: float
    router_cpu_us_per_change: float
    redis_cpu_ms_per_poll: float
    redis_ops_per_poll: float
    redis_bytes_per_instance: float
    router_bytes_per_block: float
    router_rss_mb: float
    first_states_s: float
    bootstrap_s: float
    busy: float
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    collectors_at_100_ms: float = field(default=0.0)
    """Extrapolated: cores of collectors that n instances polled each 100 ms need."""


async def measure_state(load: StateLoad) -> StateFigures:
    """Measure one size; everything is started for it and ended after it. Raises StartError."""
    async with AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dualmap-state-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        valkey = await EmbeddedValkey.start(folder)
        stack.push_async_callback(valkey.stop)
        return await _Bench(load, folder, valkey, stack).run()


class _Bench:
    """The processes of one size."""

    def __init__(self, load: StateLoad, folder: Path, valkey: EmbeddedValkey, stack: AsyncExitStack) -> None:
        self._load = load
        self._folder = folder
        self._valkey = valkey
        self._stack = stack

    async def run(self) -> StateFigures:
        load = self._load
        redis = connect(RedisOptions(self._valkey.url, socket_timeout_s=5.0))
        self._stack.push_async_callback(redis.aclose)
        empty_bytes = await _used_bytes(redis)
        await self._publish(redis, await self._start_agents())
        began_s = time.monotonic()
        collector = await self._start("statecollector")
        router = await self._start("router")
        calls = await self._stack.enter_async_context(RouterOperatorCalls(router.address))
        await self._ready(calls)
        first_states_s = time.monotonic() - began_s
        lags, busy, before, after = await self._observe(redis, collector, router)
        view = await calls.view(_VIEW_TIMEOUT_S)
        used_bytes = await _used_bytes(redis)
        seconds = after.at_s - before.at_s
        polls, writes = max(1.0, after.polls - before.polls), max(1.0, after.writes - before.writes)
        changes = max(1.0, load.instances * load.changes_per_s * seconds)
        per_poll_s = (after.collector_cpu_s - before.collector_cpu_s) / polls
        router_cpu_s = after.router_cpu_s - before.router_cpu_s
        tellable = sorted(lags) if busy < BUSY_LIMIT and lags else []
        return StateFigures(
            instances=load.instances,
            blocks=load.blocks,
            interval_ms=load.interval_ms,
            polls_per_s=polls / seconds,
            changes_per_s=changes / seconds,
            collector_cpu_ms_per_poll=per_poll_s * 1e3,
            router_cpu_ms_per_entry=router_cpu_s / writes * 1e3,
            router_cpu_us_per_change=router_cpu_s / changes * 1e6,
            redis_cpu_ms_per_poll=(after.redis_cpu_s - before.redis_cpu_s) / polls * 1e3,
            redis_ops_per_poll=(after.redis_ops - before.redis_ops) / polls,
            redis_bytes_per_instance=(used_bytes - empty_bytes) / load.instances,
            router_bytes_per_block=sum(one.kv_bytes for one in view.instances)
            / max(1, sum(one.kv_blocks for one in view.instances)),
            router_rss_mb=psutil.Process(router.process.pid).memory_info().rss / 1e6,
            first_states_s=first_states_s,
            bootstrap_s=await bootstrap_seconds(self._valkey.url, load.instances),
            busy=busy,
            lag_p50_ms=tellable[len(tellable) // 2] if tellable else None,
            lag_p99_ms=tellable[int(len(tellable) * 0.99)] if tellable else None,
            collectors_at_100_ms=per_poll_s * load.instances / DESIGN_POLL_S,
        )

    async def _start_agents(self) -> list[Member]:
        members: list[Member] = []
        left = self._load.instances
        number = 0
        while left:
            count = min(PER_PROCESS, left)
            number += 1
            name, load = f"hollow-{number}", self._load
            arguments = ["--prefix", name, "--count", str(count), "--blocks", str(load.blocks)]
            arguments += ["--changes-per-s", f"{load.changes_per_s:g}"]
            agent = await self._run(
                ServiceSpec(name, "dualmap.cli.bench_state_agents", {}, self._folder / f"{name}.log", arguments)
            )
            members += [
                Member(f"{name}/{rank}", agent.address, state=InstanceState.ACTIVE, agent_epoch=1)
                for rank in range(count)
            ]
            left -= count
        return members

    async def _publish(self, redis: Redis, members: list[Member]) -> None:
        # No ring manager: who has no queue and no lease needs none, and the state plane is what is measured.
        ring = RingSnapshot(POOL, time.time_ns() // 1_000_000, RingParameters(), tuple(members))
        await RingStore(redis, POOL).publish(ring, fencing_epoch=1)

    async def _start(self, role: str) -> RunningService:
        environment = {
            "DUALMAP_REDIS__URL": self._valkey.url,
            "DUALMAP_POOL__NAME": POOL,
            "DUALMAP_SERVER__PORT": "0",
            "DUALMAP_METRICS__PORT": "0",
        }
        if role == "statecollector":
            interval_ms = self._load.interval_ms
            environment["DUALMAP_POLL__INTERVAL_MS"] = str(interval_ms)
            environment["DUALMAP_POLL__TIMEOUT_MS"] = "5000"
            environment["DUALMAP_POLL__BACKOFF_MS"] = str(max(1_000, interval_ms))
        return await self._run(ServiceSpec(role, f"services.{role}", environment, self._folder / f"{role}.log"))

    async def _run(self, spec: ServiceSpec) -> RunningService:
        service = await start_service(spec)
        self._stack.push_async_callback(service.stop, 2.0)
        return service

    async def _ready(self, calls: RouterOperatorCalls) -> None:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while True:
                view = await calls.view(_VIEW_TIMEOUT_S)
                heard = sum(one.state_age_ms >= 0 for one in view.instances)
                if heard == self._load.instances:
                    return
                await asyncio.sleep(0.2)

    async def _observe(
        self, redis: Redis, collector: RunningService, router: RunningService
    ) -> tuple[list[float], float, Moment, Moment]:
        psutil.cpu_percent()
        before = await self._moment(redis, collector, router)
        lags: list[float] = []
        # The follower here costs CPU beside the processes measured, so it looks for half the time only.
        await asyncio.sleep(self._load.seconds / 2)
        busy = psutil.cpu_percent() / 100
        after = await self._moment(redis, collector, router)
        lags = await _lags(self._valkey.url, self._load.seconds / 2)
        return lags, busy, before, after

    async def _moment(self, redis: Redis, collector: RunningService, router: RunningService) -> Moment:
        text = await asyncio.to_thread(_scrape, str(collector.metrics_address))
        info = await redis.info("stats")
        return Moment(
            at_s=time.monotonic(),
            collector_cpu_s=_cpu_s(collector.process.pid),
            router_cpu_s=_cpu_s(router.process.pid),
            redis_cpu_s=_cpu_s(self._valkey.process.pid),
            polls=_counter(text, "dualmap_collector_polls_total", 'reason="ok"'),
            writes=_counter(text, "dualmap_collector_writes_total", 'reason="changes"'),
            redis_ops=int(info["total_commands_processed"]),
        )


async def bootstrap_seconds(redis_url: str, instances: int) -> float:
    """Seconds from an empty view to one that holds every instance whole, in this process."""
    view = ClusterView(POOL, nullcontext(), lambda: time.monotonic() * 1_000)
    client = connect(RedisOptions(redis_url).for_following())
    try:
        began_s = time.monotonic()
        follower = Follower(view, client, POOL)
        while sum(one.heard_at_ms is not None for one in view.instances.values()) < instances:
            await follower.step()
        return time.monotonic() - began_s
    finally:
        await client.aclose()


async def _lags(redis_url: str, seconds: float) -> list[float]:
    """Milliseconds from an instance's answer to its being in a view of this process (one machine, one clock)."""
    view = ClusterView(POOL, nullcontext(), lambda: time.monotonic() * 1_000)
    client = connect(RedisOptions(redis_url).for_following())
    lags: list[float] = []
    versions: dict[str, int] = {}
    try:
        follower = Follower(view, client, POOL)
        # What was written before is read first, and is no lag.
        caught_up_s = time.monotonic() + seconds / 4
        while time.monotonic() < caught_up_s:
            await follower.step()
        versions = {name: one.version for name, one in view.instances.items()}
        until_s = caught_up_s + seconds * 3 / 4
        while time.monotonic() < until_s:
            await follower.step()
            now_ms = time.monotonic() * 1_000
            for name, one in view.instances.items():
                if versions.get(name) not in (None, one.version):
                    lags.append(now_ms - one.load.finished)
                versions[name] = one.version
    finally:
        await client.aclose()
    return lags


async def _used_bytes(redis: Redis) -> int:
    return int((await redis.info("memory"))["used_memory"])


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _counter(text: str, name: str, label: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and label in line)


def bench_state(  # noqa: PLR0917  (each is an option of the command)
    sizes: Annotated[str, typer.Option(help="Numbers of instances, separated by commas.")] = "8,64,256,1000",
    blocks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Blocks held by each.")] = 9_362,
    changes: Annotated[float, typer.Option(min=0, max=10_000, help="Changed blocks a second and instance.")] = 40.0,
    seconds: Annotated[float, typer.Option(min=2, max=600, help="Time observed at each size.")] = 10.0,
    polls_per_s: Annotated[
        float, typer.Option(min=1, max=100_000, help="At most so many: longer periods.")
    ] = POLLS_PER_S,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """What the state plane costs at n instances: CPU by process times, Redis, router memory, bootstrap, lag."""
    console = Console()
    found: list[StateFigures] = []
    for size in _sizes(sizes):
        load = StateLoad(size, blocks, changes, seconds, polls_per_s)
        with console.status(f"{size} instances, polled every {load.interval_ms} ms"):
            found.append(asyncio.run(measure_state(load)))
    print_figures(found, console)
    if json is not None:
        json.write_text(jsonlib.dumps([asdict(one) for one in found], indent=2) + "\n")


def _sizes(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{given!r} is not a list of numbers", param_hint="--sizes") from None


def print_figures(found: Sequence[StateFigures], console: Console) -> None:
    """One column a size."""
    table = Table(title="state plane")
    table.add_column("figure")
    for one in found:
        table.add_column(f"n = {one.instances}", justify="right")
    rows = [asdict(one) for one in found]
    for name in rows[0] if rows else ():
        if name == "instances":
            continue
        label = name.replace("_", " ")
        if name == "collectors_at_100_ms":
            label = "cores of collectors at 100 ms polls (extrapolated)"
        table.add_row(label, *(_cell(row[name]) for row in rows))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "machine too busy"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
