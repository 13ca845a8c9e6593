"""`dualmap bench agent`: what an agent adds to an engine's stream, beside the engine itself and a bare byte pump.

One run: the engine directly, through a pump on the same HTTP library, through an agent, through two agents. Times are
the client's, CPU is the processes' own. Then the feed rule against a batching engine, and one request at a time.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Self

import aiohttp
import psutil
import typer
from rich.console import Console
from rich.table import Table

from dualmap.cli.bench_agent_engine import BATCH_TOKENS, BEAT_FIELD
from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.processes import RunningService, ServiceSpec, start_service

ENGINE = "dualmap.cli.bench_agent_engine"
PATH = "/v1/completions"
INSTANCE = "x-dualmap-instance"
MOST_CHUNKS_PER_S = 2_000.0
"""Tokens a second of all streams: two cores also hold client, engine and cluster."""

FEW_STREAMS = 8

RAMP_PER_S = 150.0
"""Streams begun a second: a thousand in one instant measure the client."""

PROMPT_TOKENS = 500
_NO_EVENTS = {
    "DUALMAP_ENGINE__KIND": "vllm",
    "DUALMAP_ENGINE__EVENTS": "false",
    "DUALMAP_ENGINE__MAX_SEQUENCES": "4096",
    "DUALMAP_POOL__TTFT_SLO_MS": "60000",
}


@dataclass(slots=True)
class Streamed:
    """What one target's clients saw, milliseconds, and what its processes used."""

    requests: int = 0
    chunks: int = 0
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    seconds: float = 0.0

    @property
    def cpu_us_per_chunk(self) -> float:
        """CPU of the measured processes for each token passed on, the requests' own costs in it."""
        return self.cpu_s * 1e6 / max(1, self.chunks)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send, and whose CPU counts."""

    name: str
    url: str
    processes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` clients, each with one stream after the other, for ``seconds``."""

    streams: int
    seconds: float
    tokens: int
    beat_ms: float

    @classmethod
    def of(cls, streams: int, seconds: float) -> Load:
        """Beats as fast as the bound of all chunks allows; streams of two seconds, shorter where they are few."""
        beat_ms = max(20.0, streams * 1_000 / MOST_CHUNKS_PER_S)
        length_ms = 100 if streams < FEW_STREAMS else 2_000
        return cls(streams, seconds, max(4, round(length_ms / beat_ms)), beat_ms)


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Client:
    """Streams from one target; prompts are token ids of its own, so that agents need no tokenizer."""

    def __init__(self, session: aiohttp.ClientSession, load: Load, seed: int) -> None:
        self._session = session
        self._load = load
        self._draw = random.Random(seed)

    def _body(self) -> bytes:
        prompt = [self._draw.randrange(50_000) for _ in range(PROMPT_TOKENS)]
        body = {"model": "default", "prompt": prompt, "max_tokens": self._load.tokens, "stream": True}
        return jsonlib.dumps({**body, BEAT_FIELD: self._load.beat_ms}).encode()

    async def run(self, url: str, until_s: float, found: Mapping[str, Streamed]) -> None:
        """One stream after the other until then; results by the instance that answered ("" where none says)."""
        while time.monotonic() < until_s:
            await self._one(url, found)

    async def _one(self, url: str, found: Mapping[str, Streamed]) -> None:
        began_s = time.perf_counter()
        body = self._body()
        began_s = time.perf_counter()
        streamed = found[""]
        try:
            async with self._session.post(url + PATH, data=body) as answer:
                streamed = found.get(answer.headers.get(INSTANCE, ""), streamed)
                last_s = 0.0
                async for data in answer.content.iter_any():
                    count = data.count(b'"text"')
                    if not count:
                        continue
                    now_s = time.perf_counter()
                    if not last_s:
                        streamed.ttft_ms.append((now_s - began_s) * 1_000)
                    else:
                        streamed.gaps_ms.append((now_s - last_s) * 1_000)
                    last_s = now_s
                    streamed.chunks += count
                streamed.failed += answer.status != 200
                streamed.requests += 1
        except aiohttp.ClientError:
            streamed.failed += 1


async def stream_all(target: Target, load: Load, names: Sequence[str] = ()) -> dict[str, Streamed]:
    """All streams of a load against a target; by answering instance where ``names`` are given, else under ""."""
    found = {name: Streamed() for name in ("", *names)}
    processes = [psutil.Process(pid) for pid in target.processes]
    before_s = _cpu_s(processes)
    began_s = time.monotonic()
    until_s = began_s + load.seconds + load.streams / RAMP_PER_S
    timeout = aiohttp.ClientTimeout(total=120.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for number in range(load.streams):
            client = Client(session, load, number)
            group.create_task(client.run(target.url, until_s, found))
            await asyncio.sleep(1 / RAMP_PER_S)
    for streamed in found.values():
        streamed.seconds = time.monotonic() - began_s
    found[""].cpu_s = _cpu_s(processes) - before_s
    return found


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: figures as measured, and beside the direct ones of the same run."""

    streams: int
    target: str
    requests: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_ttft_p50_ms: float
    added_ttft_p99_ms: float
    gap_p99_ms: float
    added_gap_p99_ms: float
    cpu_us_per_chunk: float
    chunks_per_core_s: float


def row_of(load: Load, name: str, streamed: Streamed, direct: Streamed, cpu_us: float) -> Row:
    """A target's figures against the direct ones."""
    ttft = [quantile(streamed.ttft_ms, share) for share in (0.5, 0.99)]
    base = [quantile(direct.ttft_ms, share) for share in (0.5, 0.99)]
    gap, base_gap = quantile(streamed.gaps_ms, 0.99), quantile(direct.gaps_ms, 0.99)
    return Row(
        streams=load.streams,
        target=name,
        requests=streamed.requests,
        failed=streamed.failed,
        ttft_p50_ms=ttft[0],
        ttft_p99_ms=ttft[1],
        added_ttft_p50_ms=ttft[0] - base[0],
        added_ttft_p99_ms=ttft[1] - base[1],
        gap_p99_ms=gap,
        added_gap_p99_ms=gap - base_gap,
        cpu_us_per_chunk=cpu_us,
        chunks_per_core_s=1e6 / cpu_us if cpu_us else float("nan"),
    )


class AgentBench:
    """Starts what is measured; ``async with``."""

    def __init__(self, step_ms: float, token_us: float) -> None:
        self._costs = (str(step_ms), str(token_us))
        # Told to the agents: one that has learnt its cost and one that has not would never share the work.
        self._told = {
            "DUALMAP_ENGINE__PREFILL_MS": str(step_ms),
            "DUALMAP_ENGINE__PREFILL_US_PER_TOKEN": str(max(0.1, token_us)),
        }
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def engine(self, folder: Path) -> RunningService:
        """A batching engine."""
        return await self._started(ServiceSpec("engine", ENGINE, {}, folder / "engine.log", ("engine", *self._costs)))

    async def pump(self, folder: Path, url: str) -> RunningService:
        """A byte pump before it."""
        return await self._started(ServiceSpec("pump", ENGINE, {}, folder / "pump.log", ("pump", url)))

    async def cluster(self, url: str, instances: int, **agent: str) -> LocalCluster:
        """Agents before the engine, with a router."""
        environment = {**_NO_EVENTS, **self._told, "DUALMAP_ENGINE__URL": url, **agent}
        options = LocalOptions(instances=instances, rebalance=False, environment=environment)
        return await self._stack.enter_async_context(LocalCluster(options))

    async def _started(self, spec: ServiceSpec) -> RunningService:
        service = await start_service(spec)
        self._stack.push_async_callback(service.stop, 1.0)
        return service


def http_url(service: RunningService) -> str:
    """Where a service's HTTP port is."""
    return f"http://127.0.0.1:{service.serving.get('http_port') or service.serving['port']}"


async def measure_streams(folder: Path, levels: Sequence[int], seconds: float) -> list[Row]:
    """Direct, pumped, through one agent, and relayed through two, level by level.

    Two clusters one after the other: what idles beside a measured one is in its times.
    """
    rows: list[Row] = []
    directly: dict[int, Streamed] = {}
    alone_us: dict[int, float] = {}
    async with AgentBench(step_ms=1.0, token_us=0.0) as bench:
        url = http_url(await bench.engine(folder))
        pump = await bench.pump(folder, url)
        alone = (await bench.cluster(url, instances=1)).services["agent-1"]
        for streams in levels:
            load = Load.of(streams, seconds)
            direct = directly[streams] = (await stream_all(Target("direct", url), load))[""]
            rows.append(row_of(load, "direct", direct, direct, 0.0))
            pumped = (await stream_all(Target("pump", http_url(pump), (pump.process.pid,)), load))[""]
            rows.append(row_of(load, "byte pump", pumped, direct, pumped.cpu_us_per_chunk))
            own = (await stream_all(Target("agent", http_url(alone), (alone.process.pid,)), load))[""]
            alone_us[streams] = own.cpu_us_per_chunk
            rows.append(row_of(load, "agent", own, direct, own.cpu_us_per_chunk))
    async with AgentBench(step_ms=1.0, token_us=0.0) as bench:
        url = http_url(await bench.engine(folder))
        cluster = await bench.cluster(url, instances=2)
        agents = [cluster.services[f"agent-{number}"] for number in (1, 2)]
        for streams in levels:
            load = Load.of(streams, seconds)
            both = Target("agents", http_url(agents[0]), tuple(agent.process.pid for agent in agents))
            found = await stream_all(both, load, ("agent-2/0",))
            relayed, rest = found["agent-2/0"], found[""]
            # What was served where it came in cost as much as at the agent alone; the rest is the relayed ones'.
            relayed.cpu_s = max(0.0, rest.cpu_s - rest.chunks * alone_us[streams] / 1e6)
            rows.append(row_of(load, "two agents", relayed, directly[streams], relayed.cpu_us_per_chunk))
    return sorted(rows, key=lambda row: row.streams)


@dataclass(frozen=True, slots=True)
class FeedRow:
    """Requests a second that a batching engine served under a rule, and against direct clients."""

    rule: str
    requests_per_s: float
    of_direct: float


async def measure_feed(folder: Path, clients: int, seconds: float) -> list[FeedRow]:
    """Clients with 500-token prompts and one token out: directly, by the feed rule and variants of it."""
    load = Load(clients, seconds, 1, 0.0)
    rates: dict[str, float] = {}
    async with AgentBench(step_ms=20.0, token_us=10.0) as bench:
        engine = await bench.engine(folder)
        url = http_url(engine)
        rates["direct"] = _rate((await stream_all(Target("direct", url), load))[""])
        fed = await bench.cluster(url, instances=1)
        rates["feed rule"] = await _fed(fed, load)
        two = await bench.cluster(url, instances=1, DUALMAP_AGENT__FEED_TOKENS=str(2 * BATCH_TOKENS))
        rates["two batches"] = await _fed(two, load)
        one = await bench.cluster(url, instances=1, DUALMAP_AGENT__FEED_TOKENS="1")
        rates["one at a time"] = await _fed(one, load)
        rates["direct, again"] = _rate((await stream_all(Target("direct", url), load))[""])
    base = (rates["direct"] + rates["direct, again"]) / 2
    return [FeedRow(rule, rate, rate / base) for rule, rate in rates.items()]


async def _fed(cluster: LocalCluster, load: Load) -> float:
    agent = cluster.services["agent-1"]
    found = await stream_all(Target("agent", http_url(agent)), load)
    return _rate(found[""])


def _rate(streamed: Streamed) -> float:
    return streamed.requests / streamed.seconds


def agent(
    streams: Annotated[str, typer.Option(help="Streams at once, one run each, comma-separated.")] = "1,64,256,1000",
    seconds: Annotated[float, typer.Option(min=1, max=300, help="Of each run, its ramp not counted.")] = 8.0,
    clients: Annotated[int, typer.Option(min=1, max=1_000, help="Clients of the feed rule's runs.")] = 64,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """What an agent adds to an engine's stream; the feed rule on a batching engine."""
    levels = [int(level) for level in streams.split(",")]
    folder = Path.cwd() if json is None else json.resolve().parent
    rows = asyncio.run(measure_streams(folder, levels, seconds))
    feed = asyncio.run(measure_feed(folder, clients, seconds))
    console = Console()
    console.print(_stream_table(rows), _feed_table(feed, clients))
    busy = os.getloadavg()[0]
    console.print(f"load average {busy:.1f} on {os.cpu_count()} cores: the machine's own noise is in every figure")
    if json is not None:
        figures = {"streams": [asdict(row) for row in rows], "feed": [asdict(row) for row in feed], "load": busy}
        json.write_text(jsonlib.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _stream_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Streams: client's times in ms, CPU of the processes between client and engine")
    for name in ("streams", "through", "requests", "failed", "TTFT p50", "p99", "added p50", "p99"):
        table.add_column(name, justify="right")
    for name in ("gap p99", "added", "µs/chunk", "chunks/s/core"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.ttft_p50_ms, row.ttft_p99_ms, row.added_ttft_p50_ms, row.added_ttft_p99_ms)
        cells = [str(row.streams), row.target, str(row.requests), str(row.failed), *(f"{f:.1f}" for f in figures)]
        cells += [f"{row.gap_p99_ms:.1f}", f"{row.added_gap_p99_ms:+.1f}"]
        cells += [f"{row.cpu_us_per_chunk:.0f}", f"{row.chunks_per_core_s:.0f}"] if row.cpu_us_per_chunk else ["", ""]
        table.add_row(*cells)
    return table


def _feed_table(rows: Sequence[FeedRow], clients: int) -> Table:
    table = Table("rule", "requests/s", "of direct", title=f"{clients} clients, 500-token prompts, batching engine")
    for row in rows:
        table.add_row(row.rule, f"{row.requests_per_s:.1f}", f"{row.of_direct:.3f}")
    return table
