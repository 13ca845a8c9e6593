"""Promises of traced streams at the asyncio server."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualmap.rpc.clients import aio_channel
from dualmap.rpc.server import AioServer
from dualmap.runtime.settings import ServerSettings
from dualmap.runtime.telemetry import QuietExporter, Telemetry
from dualmap.v1 import router_pb2, router_pb2_grpc
from tests.rpc.servers import AioRouter, Parts
from tests.waiting import until

LONG_ID = "x" * 500_000
"""A few of them fill the connection, so that the server waits in a send when its caller goes."""


class _Flood(AioRouter):
    """Answers without end, as fast as they are taken."""

    answers = 0

    async def RouteStream(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.RouteStreamResponse]:
        async for request in requests:
            if request.request.request_id == "once":
                yield router_pb2.RouteStreamResponse(request_id="once")
                return
            while True:
                self.answers += 1
                yield router_pb2.RouteStreamResponse(request_id=LONG_ID)


class _Running:
    def __init__(self, spans: InMemorySpanExporter, parts: Parts, servicer: _Flood, channel: grpc.aio.Channel) -> None:
        self.spans = spans
        self.parts = parts
        self.servicer = servicer
        self.router = router_pb2_grpc.RouterStub(channel)

    def ask(self, request_id: str) -> Any:
        return self.router.RouteStream(
            iter([router_pb2.RouteStreamRequest(request=router_pb2.RouteRequest(request_id=request_id))])
        )


@pytest.fixture
async def running() -> AsyncIterator[_Running]:
    """A traced server and a real stub."""
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    parts, servicer = Parts(Telemetry(provider, QuietExporter(spans))), _Flood()
    server = AioServer(ServerSettings(), parts.parts)
    server.add(router_pb2_grpc.add_RouterServicer_to_server, servicer)
    port = await server.start()
    async with aio_channel(f"127.0.0.1:{port}") as channel:
        yield _Running(spans, parts, servicer, channel)
        await server.stop()


async def test_a_caller_that_leaves_in_mid_send_leaves_no_context_behind(
    running: _Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Its span ends and tracing logs no error: the generators are closed in the task that ran them."""
    call = running.ask("flood")
    await call.read()
    answers = -1
    while answers != running.servicer.answers:
        answers = running.servicer.answers
        await asyncio.sleep(0.05)
    with caplog.at_level(logging.ERROR, "opentelemetry"):
        call.cancel()
        await until(lambda: running.parts.handled("RouteStream", "CANCELLED") == 1)
        gc.collect()
        await until(lambda: any(span.name.endswith("RouteStream") for span in running.spans.get_finished_spans()))

    # grpc's own line about the failed send is not ours to judge.
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_a_traced_stream_answers_and_ends(running: _Running) -> None:
    """With its answers in order, code OK and a span."""
    assert [answer.request_id async for answer in running.ask("once")] == ["once"]
    await until(lambda: running.parts.handled("RouteStream", "OK") == 1)
    await until(lambda: len(running.spans.get_finished_spans()) == 1)
