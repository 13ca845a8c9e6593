"""Promises of the asyncio server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dualmap.rpc.clients import aio_channel
from dualmap.rpc.server import AioServer
from dualmap.rpc.status import problem_of
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.settings import ServerSettings
from dualmap.v1 import router_pb2, router_pb2_grpc
from tests.rpc.servers import AioRouter, Parts
from tests.waiting import until


class _Running:
    def __init__(self, parts: Parts, servicer: AioRouter, server: AioServer, channel: grpc.aio.Channel) -> None:
        self.parts = parts
        self.servicer = servicer
        self.server = server
        self.channel = channel
        self.router = router_pb2_grpc.RouterStub(channel)
        # Its stubs' types end at the class.
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def route(self, request_id: str) -> router_pb2.RouteResponse:
        return await self.router.Route(router_pb2.RouteRequest(request_id=request_id), timeout=10)


@pytest.fixture
async def running() -> AsyncIterator[_Running]:
    """A real server on any free port and a real stub."""
    parts, servicer = Parts(), AioRouter()
    server = AioServer(ServerSettings(max_message_bytes=10_000, max_concurrent_rpcs=4), parts.parts)
    server.add(router_pb2_grpc.add_RouterServicer_to_server, servicer)
    servicer.stopping = server.stopping
    port = await server.start()
    async with aio_channel(f"127.0.0.1:{port}", max_message_bytes=1_000_000) as channel:
        yield _Running(parts, servicer, server, channel)
        await server.stop()


async def test_a_call_is_answered_and_counted(running: _Running) -> None:
    """With method and code."""
    assert (await running.route("r1")).request_id == "r1"
    assert running.parts.handled("Route", "OK") == 1


async def test_a_domain_error_reaches_the_client_with_its_delay(running: _Running) -> None:
    """Code, reason, RetryInfo; counted under its code."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.route("busy")

    problem = problem_of(failed.value)
    assert (problem.code, problem.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert problem.retry_after_ms == 1500
    # The caller may have the status before the call is counted.
    await until(lambda: running.parts.handled("Route", "RESOURCE_EXHAUSTED") == 1)


async def test_a_defect_is_internal_and_tells_nothing(running: _Running) -> None:
    """Details stay in the log."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.route("defect")

    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failed.value.details())
    # The caller may have the status before the call is counted.
    await until(lambda: running.parts.handled("Route", "INTERNAL") == 1)


async def test_a_code_that_a_handler_gave_itself_is_kept(running: _Running) -> None:
    """The table is for raised errors only."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.route("abort")

    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "by hand")
    # The caller may have the status before the call is counted.
    await until(lambda: running.parts.handled("Route", "OUT_OF_RANGE") == 1)


async def test_a_stream_answers_then_ends_with_its_error(running: _Running) -> None:
    """The same mapping for streams."""
    stream = running.router.RouteStream(timeout=10)
    await stream.write(router_pb2.RouteStreamRequest(request=router_pb2.RouteRequest(request_id="r1")))
    assert isinstance(answer := await stream.read(), router_pb2.RouteStreamResponse)
    assert answer.request_id == "r1"
    await stream.write(router_pb2.RouteStreamRequest(request=router_pb2.RouteRequest(request_id="busy")))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stream.read()

    assert problem_of(failed.value).reason == "OVERLOADED"
    assert running.parts.handled("RouteStream", "RESOURCE_EXHAUSTED") == 1


async def test_a_cancelled_call_is_counted_as_such(running: _Running) -> None:
    """Not as a success, not as a defect."""
    call = asyncio.ensure_future(running.route("wait"))
    await asyncio.wait_for(running.servicer.entered.wait(), 10)
    call.cancel()
    async with asyncio.timeout(10):
        while not running.parts.handled("Route", "CANCELLED"):
            await asyncio.sleep(0.005)


async def test_an_over_long_message_is_refused_and_the_connection_kept(running: _Running) -> None:
    """RESOURCE_EXHAUSTED, and the next call works."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.route("x" * 20_000)

    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await running.route("r2")).request_id == "r2"


async def test_calls_over_the_limit_are_shed(running: _Running) -> None:
    """The fifth of four is refused at once, not queued."""
    calls = [asyncio.ensure_future(running.route("wait")) for _ in range(5)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    running.servicer.go_on.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert len(done) == 1
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert [error.code() for error in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_health_names_the_whole_and_each_component(running: _Running) -> None:
    """A balancer asks for the whole by the service it calls; an unknown name is NOT_FOUND."""
    redis = running.parts.health.component("redis")

    async def status(name: str) -> int:
        answer = await running.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        return int(answer.status)

    names = ("", "dualmap.v1.Router", "liveness", "redis")
    assert [await status(name) for name in names] == [2, 2, 1, 2]
    redis.ok()
    assert [await status(name) for name in names] == [1, 1, 1, 1]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await status("none")
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stop_says_not_serving_lets_calls_end_and_ends_streams(running: _Running) -> None:
    """In this order, and long before the grace is used up."""
    watch = running.health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert (await watch.read()).status == 1
    stream = running.router.RouteStream(timeout=20)
    await stream.write(router_pb2.RouteStreamRequest(request=router_pb2.RouteRequest(request_id="endless")))
    await stream.read()
    call = asyncio.ensure_future(running.route("wait"))
    await asyncio.wait_for(running.servicer.entered.wait(), 10)

    began_s = time.monotonic()
    stopped = asyncio.ensure_future(running.server.stop())
    heard = (await watch.read()).status
    watch_ended = await watch.read() is grpc.aio.EOF
    stream_ended = await stream.read() is grpc.aio.EOF
    running.servicer.go_on.set()
    await stopped

    assert (heard, watch_ended, stream_ended) == (2, True, True)
    assert (await call).request_id == "wait"
    assert time.monotonic() - began_s < 3.0


async def test_a_port_in_use_is_one_clear_error(running: _Running) -> None:
    """Never two servers on one port in silence."""
    other = AioServer(ServerSettings(port=running.server.port), Parts().parts)

    with pytest.raises(StartError, match=f"gRPC port 127.0.0.1:{running.server.port} is in use"):
        await other.start()


async def test_reflection_names_our_services(running: _Running) -> None:
    """For grpcurl."""
    stub = cast("Any", reflection_pb2_grpc).ServerReflectionStub(running.channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    answers = [answer async for answer in stub.ServerReflectionInfo(ask(), timeout=10)]

    names = {service.name for service in answers[0].list_services_response.service}
    assert {"dualmap.v1.Router", "grpc.health.v1.Health"} <= names


async def test_a_unary_call_without_timeout_is_refused(running: _Running) -> None:
    """By our own channels, before anything is sent."""
    with pytest.raises(ValueError, match="timeout"):
        await running.router.Route(router_pb2.RouteRequest(request_id="r1"))
