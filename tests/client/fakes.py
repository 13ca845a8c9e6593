"""Scripted agents and routers: real aio servers on free ports, each saying what a test told it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from dualmap.core.errors import DualMapError
from dualmap.rpc.status import status_of
from dualmap.v1 import agent_pb2, agent_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

Script = Callable[[agent_pb2.SubmitRequest], AsyncIterator[agent_pb2.RequestEvent]]


async def refuse(context: Any, error: DualMapError) -> None:
    """Answer as our servers do."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


class FakeAgent(agent_pb2_grpc.InstanceAgentServicer):
    """An agent whose Submit plays a script; an exception in it is the answer."""

    def __init__(self, instance_id: str, script: Script) -> None:
        self.instance_id = instance_id
        self.script = script
        self.submitted: list[agent_pb2.SubmitRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()
        self.address = ""

    async def Submit(self, request: agent_pb2.SubmitRequest, context: Any) -> AsyncIterator[agent_pb2.SubmitResponse]:
        self.submitted.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.script(request):
                yield agent_pb2.SubmitResponse(event=event)
        except DualMapError as error:
            await refuse(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            # A caller that leaves while an event is being written closes the generator instead of cancelling it.
            self.cancelled.set()
            raise

    def _unused(self, *_: object) -> None:
        raise AssertionError("not called by a client")

    GetState = PollState = ListQueue = Migrate = Accept = Offer = Pull = _unused  # type: ignore[assignment]


class FakeRouter(router_pb2_grpc.RouterServicer):
    """A router that answers with the next of its answers: a route's instances, or an error."""

    def __init__(self, *answers: tuple[FakeAgent, FakeAgent | None] | DualMapError) -> None:
        self.answers = list(answers)
        self.asked: list[router_pb2.RouteRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.released: list[tuple[str, int]] = []
        self.address = ""
        self.traceparent = ""

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, DualMapError):
            await refuse(context, answer)
            return router_pb2.RouteResponse()
        chosen, backup = answer
        response = router_pb2.RouteResponse(
            request_id=request.request_id,
            attempt=request.attempt,
            instance=_address(chosen),
            reason=types_pb2.REASON_CACHE_HIT,
            hit_tokens=256,
            predicted_ttft_ms=12.5,
            ring_epoch=5,
        )
        response.ticket.sequence = len(self.asked)
        response.ticket.traceparent = self.traceparent
        if backup is not None:
            response.backup.CopyFrom(_address(backup))
        return response

    async def Release(self, request: router_pb2.ReleaseRequest, context: Any) -> router_pb2.ReleaseResponse:
        self.released.append((request.request_id, request.attempt))
        return router_pb2.ReleaseResponse(released=len(self.released) == 1)

    def _unused(self, *_: object) -> None:
        raise AssertionError("not called by the client")

    RouteStream = Explain = GetView = _unused  # type: ignore[assignment]


def _address(agent: FakeAgent) -> types_pb2.InstanceAddress:
    return types_pb2.InstanceAddress(instance_id=agent.instance_id, grpc_address=agent.address)


@asynccontextmanager
async def serving(*parts: FakeAgent | FakeRouter) -> AsyncIterator[None]:
    """Serve each part on a port of its own."""
    servers = []
    for part in parts:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        if isinstance(part, FakeAgent):
            agent_pb2_grpc.add_InstanceAgentServicer_to_server(part, server)
        else:
            router_pb2_grpc.add_RouterServicer_to_server(part, server)
        part.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(0)


def queued() -> agent_pb2.RequestEvent:
    return agent_pb2.RequestEvent(queued=agent_pb2.Queued(instance_id="x", position=1, predicted_ttft_ms=3))


def first_token(data: bytes = b"a") -> agent_pb2.RequestEvent:
    first = agent_pb2.FirstToken(instance_id="x", ttft_ms=20, hit_tokens=256, prompt_tokens=300, data=data)
    return agent_pb2.RequestEvent(first_token=first)


def tokens(data: bytes) -> agent_pb2.RequestEvent:
    return agent_pb2.RequestEvent(tokens=agent_pb2.Tokens(count=1, data=data))


def done(instance_id: str = "x") -> agent_pb2.RequestEvent:
    ended = agent_pb2.Done(instance_id=instance_id, output_tokens=2, ttft_ms=20, total_ms=30, finish_reason="stop")
    return agent_pb2.RequestEvent(done=ended)


async def answers_well(request: agent_pb2.SubmitRequest) -> AsyncIterator[agent_pb2.RequestEvent]:
    yield queued()
    yield agent_pb2.RequestEvent(started=agent_pb2.Started(instance_id="x", waited_ms=2))
    yield first_token(b"a")
    yield agent_pb2.RequestEvent(pulse=agent_pb2.Pulse())
    yield tokens(b"b")
    yield done()


def fails_with(error: DualMapError, *before: agent_pb2.RequestEvent) -> Script:
    async def script(request: agent_pb2.SubmitRequest) -> AsyncIterator[agent_pb2.RequestEvent]:
        for event in before:
            yield event
        raise error

    return script


async def ends_early(request: agent_pb2.SubmitRequest) -> AsyncIterator[agent_pb2.RequestEvent]:
    yield queued()


async def falls_silent(request: agent_pb2.SubmitRequest) -> AsyncIterator[agent_pb2.RequestEvent]:
    yield queued()
    await asyncio.Event().wait()
