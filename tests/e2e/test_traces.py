"""Traces as a real OTLP collector gets them from real processes: joined, complete, without a word of a prompt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.client import DualMapClient, Prompt, Request
from dualmap.runtime.telemetry import start_telemetry
from tests.compose.traces import check_traces
from tests.e2e.conftest import Start
from tests.e2e.otlp import Collector, Seen, collecting
from tests.waiting import until

SECRET = "the-words-of-a-prompt-go-nowhere"
ROUTE, SUBMIT = "dualmap.v1.Router/Route", "/dualmap.v1.InstanceAgent/Submit"
STATES = {"queue wait", "prefill", "decode"}
ONE_AT_A_TIME = {"DUALMAP_AGENT__MAX_SEQUENCES": "1"}
PAUSED = "agent-1"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Every process of the test exports to it, soon."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield collector


def request(request_id: str, seed: int) -> Request:
    ids = struct.pack("<256I", *((seed * 7_919 + i) % 50_000 for i in range(256)))
    return Request(request_id, Prompt(token_ids=ids), max_output_tokens=4)


@asynccontextmanager
async def traced_client(cluster: LocalCluster) -> AsyncIterator[DualMapClient]:
    telemetry = start_telemetry("client")
    try:
        async with DualMapClient(cluster.router_addresses, tracer=telemetry.tracer("dualmap.client")) as client:
            yield client
    finally:
        await asyncio.to_thread(telemetry.shutdown)


async def trace_of(collector: Collector, request_id: str, *names: str) -> list[Seen]:
    """The request's whole trace, once spans of these names are in it and every parent has arrived."""

    def whole() -> bool:
        spans = collector.of_request(request_id)
        ids = {span.span_id for span in spans}
        parents = {span.parent_span_id for span in spans if span.parent_span_id}
        return set(names) <= {span.name for span in spans} and parents <= ids

    await until(whole, 20.0)
    return collector.of_request(request_id)


def problems_of(spans: Sequence[Seen]) -> tuple[str, ...]:
    return check_traces(json.dumps(span.line) for span in spans).problems


async def ask_by_http(cluster: LocalCluster) -> str:
    """One unmodified OpenAI request to the first agent; its id."""
    port = cluster.services[PAUSED].serving["http_port"]
    body = {"model": "default", "prompt": SECRET * 40, "max_tokens": 4}
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return response.headers["x-dualmap-request-id"]


async def ask_by_command(cluster: LocalCluster) -> dict[str, object]:
    """`dualmap route --trace --run --json` as a process."""
    arguments = ["route", "--routers", ",".join(cluster.router_addresses), "--text", SECRET * 40]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dualmap.cli",
        *arguments,
        "--trace",
        "--run",
        "--json",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DUALMAP_JAEGER_URL": "http://jaeger.example:16686/"},
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    assert process.returncode == 0
    said: dict[str, object] = json.loads(output)
    return said


async def moved_ones(cluster: LocalCluster, collector: Collector) -> list[list[Seen]]:
    """The traces of requests that left a wedged agent; the engine goes on once one did."""
    async with traced_client(cluster) as client:
        cluster.services[PAUSED].send(signal.SIGUSR1)
        running = [asyncio.create_task(client.complete(request(f"m{i}", i), 60.0)) for i in range(8)]
        try:
            await until(lambda: any(span.name == "rebalance.round" for span in collector.spans), 30.0)
            await until(lambda: any(task.done() for task in running), 10.0)
        finally:
            cluster.services[PAUSED].send(signal.SIGUSR2)
        done = [completion.done for completion in await asyncio.gather(*running)]
    traces = [await trace_of(collector, f"m{i}", "dualmap.request", ROUTE, SUBMIT, *STATES) for i in range(8)]
    return [trace for trace, end in zip(traces, done, strict=True) if end.handovers]


@pytest.mark.slow
async def test_every_way_in_is_one_joined_trace(start: Start, collector: Collector) -> None:
    """Route and Submit, a migration with both agents and the round, the front door, the command: each one trace."""
    options = LocalOptions(instances=2, engine_faults=True, environment=ONE_AT_A_TIME)
    async with start(options) as cluster:
        async with traced_client(cluster) as client:
            await client.complete(request("plain", 1_000), 30.0)
        plain = await trace_of(collector, "plain", "dualmap.request", ROUTE, SUBMIT, *STATES)
        _is_told_whole(plain)

        http_id = await ask_by_http(cluster)
        door = await trace_of(collector, http_id, "POST /v1/completions", ROUTE, *STATES)
        roots = [span.name for span in door if not span.parent_span_id]
        assert roots == ["POST /v1/completions"]
        assert {span.service for span in door} >= {"dualmap-router", "dualmap-instanceagent"}

        said = await ask_by_command(cluster)
        trace_id = str(said["trace_id"])
        await until(lambda: {ROUTE, SUBMIT, *STATES} <= {s.name for s in collector.of_trace(trace_id)}, 20.0)
        assert said["trace_url"] == f"http://jaeger.example:16686/trace/{trace_id}"

        moved = await moved_ones(cluster, collector)
    assert moved
    for trace in moved:
        _shows_the_move(trace, collector)
    # The command puts a span of its own above the client's.
    assert problems_of([span for span in collector.spans if span.trace_id != trace_id]) == ()
    shown = repr(collector.spans)
    assert SECRET not in shown


def _is_told_whole(trace: list[Seen]) -> None:
    """Attributes where they belong, by the conventions' names."""
    by_name = {span.name: span for span in trace}
    route, root = by_name[ROUTE].attributes, by_name["dualmap.request"].attributes
    assert {"dualmap.reason", "dualmap.hit_tokens", "dualmap.predicted_ttft_ms"} <= route.keys()
    assert {"dualmap.ring_epoch", "dualmap.state_age_ms", "rpc.service", "rpc.method"} <= route.keys()
    assert {"gen_ai.operation.name", "gen_ai.response.time_to_first_chunk"} <= root.keys()
    assert root["gen_ai.usage.input_tokens"] == 256
    assert root["gen_ai.usage.output_tokens"] == 4
    prefill = by_name["prefill"].attributes
    assert {"dualmap.ttft_ms", "dualmap.predicted_ttft_ms", "gen_ai.usage.cache_read.input_tokens"} <= prefill.keys()
    assert by_name[SUBMIT].parent_span_id == by_name[ROUTE].span_id
    assert by_name[ROUTE].parent_span_id == by_name["dualmap.request"].span_id


def _shows_the_move(trace: list[Seen], collector: Collector) -> None:
    """Both agents in one trace, and the hand-over leads to the round that planned it."""
    rounds = {(span.trace_id, span.span_id) for span in collector.spans if span.name == "rebalance.round"}
    states = [span for span in trace if span.name in STATES | {"hand over"}]
    assert {str(span.attributes["dualmap.instance"]) for span in states} == {"agent-1/0", "agent-2/0"}
    hand_overs = [span for span in trace if span.name == "hand over"]
    assert any(link in rounds for span in hand_overs for link in span.links)


@pytest.mark.slow
async def test_what_the_caller_does_not_sample_nobody_records(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parent-based: the client's decision holds at router and agent."""
    async with start(LocalOptions(instances=1)) as cluster:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with traced_client(cluster) as client:
            await client.complete(request("dark", 5), 30.0)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        async with traced_client(cluster) as client:
            await client.complete(request("light", 6), 30.0)
        await trace_of(collector, "light", "dualmap.request", ROUTE, SUBMIT, *STATES)

    assert collector.of_request("dark") == []
