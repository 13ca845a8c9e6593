"""One trace per request: from the ticket through both agents, with nothing of the prompt in it."""

from __future__ import annotations

import grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import types_pb2
from tests.services.instanceagent.cluster import cluster, migrate, submission, submit, until

TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = f"00-{TRACE:032x}-b7ad6b7169203331-01"


async def test_a_moved_request_is_one_trace_from_the_tickets_context() -> None:
    """Queue wait, hand over, then the target's queue wait, prefill, decode: all in the ticket's trace."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    agent = {"max_sequences": 1, "suspect_after_ms": 60_000}
    async with cluster("a", "b", agent=agent, telemetry=Telemetry(provider)) as built:
        built.pause("a")
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9))
        await until(lambda: "started" in running.kinds, "full")
        ticket = types_pb2.Ticket(
            router_id=1,
            instance_id="a/0",
            sequence=1,
            traceparent=PARENT,
            chosen=types_pb2.Promise(instance_id="a/0", predicted_ttft_ms=30.0),
            backup=types_pb2.Promise(instance_id="b/0", hit_tokens=128, predicted_ttft_ms=40.0),
        )
        following = submit(stub, submission("r1", ticket=ticket))
        await until(lambda: bool(built.instance("a").held.waiting), "waits")
        assert await migrate(stub, "a/0", "b/0", "r1", traceparent=PARENT) == ["MOVED"]
        assert await following.end() is grpc.StatusCode.OK
        built.resume("a")
        await running.end()
    spans = [span for span in exporter.get_finished_spans() if span.context is not None]
    ours = [span for span in spans if span.context.trace_id == TRACE]
    told = {(span.name, (span.attributes or {})["dualmap.instance"]) for span in ours}
    assert told == {
        ("queue wait", "a/0"),
        ("hand over", "a/0"),
        ("queue wait", "b/0"),
        ("prefill", "b/0"),
        ("decode", "b/0"),
    }
    hand_over = next(span for span in ours if span.name == "hand over")
    assert [link.context.trace_id for link in hand_over.links] == [TRACE]
    beyond = [span for span in ours if (span.attributes or {})["dualmap.instance"] == "b/0"]
    assert {span.parent.span_id for span in beyond if span.parent} == {hand_over.context.span_id}
    shown = [value for span in spans for value in (span.attributes or {}).values()]
    texts = {value for value in shown if isinstance(value, str)}
    assert all(isinstance(value, int | float | str) for value in shown)
    assert texts <= {"a/0", "b/0", "r1", "running", "default", "migrate"}
    facts = {span.name: span.attributes or {} for span in ours}
    assert (facts["hand over"]["dualmap.target"], facts["hand over"]["dualmap.cause"]) == ("b/0", "migrate")
    assert facts["queue wait"]["gen_ai.usage.input_tokens"] == 256
    assert facts["prefill"]["dualmap.predicted_ttft_ms"] == 40.0
    assert facts["prefill"]["dualmap.promised_hit_tokens"] == 128
    ttft_ms = facts["prefill"]["dualmap.ttft_ms"]
    assert isinstance(ttft_ms, float)
    assert ttft_ms > 0
    assert facts["prefill"]["gen_ai.usage.cache_read.input_tokens"] == 0
