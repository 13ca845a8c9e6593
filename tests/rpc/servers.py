"""Servicers written by hand and servers around them, for tests of the plumbing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from dualmap.core import errors
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.server import ServerParts
from dualmap.runtime.health import Health
from dualmap.runtime.telemetry import Telemetry, start_telemetry
from dualmap.v1 import router_pb2, router_pb2_grpc


class Parts:
    """A server's parts, with the registry in reach."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self.registry = CollectorRegistry()
        self.health = Health()
        self.parts = ServerParts(self.health, RpcMetrics(self.registry), telemetry or start_telemetry("test", {}))

    def handled(self, method: str, code: str) -> float:
        labels = {"method": f"/dualmap.v1.Router/{method}", "code": code}
        return self.registry.get_sample_value("dualmap_rpc_handled_total", labels) or 0.0


def fail_as(request_id: str) -> None:
    """What a request id asks for."""
    if request_id == "busy":
        raise errors.Overloaded(1500, "test")
    if request_id == "defect":
        raise KeyError("inner secret")


class AioRouter(router_pb2_grpc.RouterServicer):
    """Answers, fails or waits, as the request id says."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.stopping: asyncio.Event | None = None

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        fail_as(request.request_id)
        if request.request_id == "abort":
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "by hand")
        if request.request_id == "wait":
            self.entered.set()
            await self.go_on.wait()
        return router_pb2.RouteResponse(request_id=request.request_id)

    async def RouteStream(
        self, requests: AsyncIterator[router_pb2.RouteStreamRequest], context: Any
    ) -> AsyncIterator[router_pb2.RouteStreamResponse]:
        async for request in requests:
            fail_as(request.request.request_id)
            yield router_pb2.RouteStreamResponse(request_id=request.request.request_id)
            if request.request.request_id == "endless" and self.stopping is not None:
                await self.stopping.wait()
                return

    async def Explain(self, request: Any, context: Any) -> router_pb2.ExplainResponse:
        return router_pb2.ExplainResponse()

    async def Release(self, request: Any, context: Any) -> router_pb2.ReleaseResponse:
        return router_pb2.ReleaseResponse()

    async def GetView(self, request: Any, context: Any) -> router_pb2.GetViewResponse:
        return router_pb2.GetViewResponse()


class SyncRouter(router_pb2_grpc.RouterServicer):
    """The same for the thread-pool server."""

    def Route(self, request: router_pb2.RouteRequest, context: grpc.ServicerContext) -> router_pb2.RouteResponse:
        fail_as(request.request_id)
        if request.request_id == "abort":
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "by hand")
        return router_pb2.RouteResponse(request_id=request.request_id)

    def RouteStream(
        self, requests: Iterator[router_pb2.RouteStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[router_pb2.RouteStreamResponse]:
        for request in requests:
            fail_as(request.request.request_id)
            yield router_pb2.RouteStreamResponse(request_id=request.request.request_id)

    def Explain(self, request: Any, context: Any) -> router_pb2.ExplainResponse:
        return router_pb2.ExplainResponse()

    def Release(self, request: Any, context: Any) -> router_pb2.ReleaseResponse:
        return router_pb2.ReleaseResponse()

    def GetView(self, request: Any, context: Any) -> router_pb2.GetViewResponse:
        return router_pb2.GetViewResponse()
