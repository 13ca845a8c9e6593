"""The Route span: under the client's, told to the agent by the ticket, numbers only."""

from __future__ import annotations

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from tests.services.router.harness import chain_of_blocks, pool_of, request, running_router

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_a_route_is_a_span_under_the_clients_and_in_the_ticket() -> None:
    """One trace: client, Route, and by the ticket the agent's spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running_router(pool_of(2), provider=provider) as router:
        answer = router.route(request("r", chain_of_blocks(1, 4)), metadata=(("traceparent", PARENT),))
        with pytest.raises(grpc.RpcError):
            router.route(request("r", priority=7))

    good, bad = exporter.get_finished_spans()
    assert good.name == "dualmap.v1.Router/Route"
    assert good.kind is SpanKind.SERVER
    assert good.context is not None
    assert f"{good.context.trace_id:032x}" == TRACE
    assert answer.ticket.traceparent == f"00-{TRACE}-{good.context.span_id:016x}-01"
    attributes = dict(good.attributes or {})
    assert attributes["dualmap.instance"] == answer.instance.instance_id
    assert attributes["dualmap.reason"] == "LESS_LOADED"
    assert attributes["dualmap.ring_epoch"] == 5
    assert {"dualmap.hit_tokens", "dualmap.predicted_ttft_ms", "dualmap.state_age_ms"} <= attributes.keys()
    assert attributes["dualmap.request_id"] == "r"
    assert (attributes["rpc.system"], attributes["rpc.service"]) == ("grpc", "dualmap.v1.Router")
    assert attributes["dualmap.other_instance"] == answer.backup.instance_id
    assert bad.status.status_code is StatusCode.ERROR
    assert bad.status.description == "INVALID_REQUEST"


def test_without_traces_a_ticket_has_no_context() -> None:
    """Nothing is made up."""
    with running_router(pool_of(2)) as router:
        assert router.route(request("r", (1,)), metadata=(("traceparent", PARENT),)).ticket.traceparent == ""


def test_a_route_that_is_not_sampled_says_so_in_its_ticket() -> None:
    """The agent must not begin a trace of its own; and what was drawn for one trace names no other."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(0.25))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running_router(pool_of(2), provider=provider) as router:
        told = [router.route(request(f"r{number}", (1,))).ticket.traceparent for number in range(200)]
        with pytest.raises(grpc.RpcError):
            router.route(request("r", priority=7))

    sampled = {parent.split("-")[1] for parent in told if int(parent[-2:], 16) & 1}
    recorded = {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans() if span.context is not None}
    assert len({parent.split("-")[1] for parent in told}) == 200
    assert 10 < len(sampled) < 120
    assert sampled <= recorded
    assert len(recorded - sampled) <= 1
    assert all(len(parent) == 55 for parent in told)
