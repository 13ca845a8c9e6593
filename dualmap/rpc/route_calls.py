"""Calls to routers and Submit streams to agents, in values. Each is one try: who to try next is the client's affair."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

import grpc
import grpc.aio

from dualmap.rpc.clients import ROUTER_MESSAGE_BYTES, aio_channel
from dualmap.rpc.convert_client import event_value, route_message, route_value, submit_message
from dualmap.rpc.route_values import Event, Request, Route
from dualmap.rpc.status import Problem, problem_of
from dualmap.v1 import agent_pb2, agent_pb2_grpc, router_pb2, router_pb2_grpc

Metadata = Sequence[tuple[str, str]]

_MAX_AGENT_CHANNELS = 1_024
_CHANNEL_GRACE_S = 60.0


class CallFailed(Exception):
    """A call ended with an error. ``reason`` is the server's own word for it, empty when gRPC itself failed.

    ``code`` is the gRPC code's name. ``retry_after_ms`` is the server's advice; None: it gave none.
    """

    def __init__(self, target: str, problem: Problem) -> None:
        super().__init__(f"{target}: {problem.code.name}: {problem.message}")
        self.target = target
        self.code = problem.code.name
        self.message = problem.message
        self.reason = problem.reason
        self.retry_after_ms = problem.retry_after_ms
        self.fields = problem.fields


class RouterCalls:
    """One router at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = aio_channel(address, max_message_bytes=ROUTER_MESSAGE_BYTES)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def route(self, request: Request, timeout_s: float, metadata: Metadata = ()) -> Route:
        """Where the request goes. Raises CallFailed."""
        try:
            answer = await self._stub.Route(route_message(request), timeout=timeout_s, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise CallFailed(f"router {self.address}", problem_of(error)) from error
        return route_value(answer)

    async def release(self, request_id: str, attempt: int, timeout_s: float) -> bool:
        """Give a booking back; False when this router holds none. Raises CallFailed."""
        message = router_pb2.ReleaseRequest(request_id=request_id, attempt=attempt)
        try:
            return (await self._stub.Release(message, timeout=timeout_s)).released
        except grpc.aio.AioRpcError as error:
            raise CallFailed(f"router {self.address}", problem_of(error)) from error

    async def close(self) -> None:
        """Close the channel; calls under way end."""
        await self._channel.close()


class SubmitCall:
    """One Submit stream, read by one task."""

    def __init__(
        self, address: str, call: grpc.aio.UnaryStreamCall[agent_pb2.SubmitRequest, agent_pb2.SubmitResponse]
    ) -> None:
        self._target = f"agent {address}"
        self._call = call

    async def next(self, silence_s: float, left_s: float) -> Event:
        """The next event; not to be asked for after Done.

        Raises CallFailed: UNAVAILABLE when the stream ends or ``silence_s`` pass without an event, DEADLINE_EXCEEDED
        when ``left_s`` are over first, else what the agent said.
        """
        try:
            async with asyncio.timeout(min(silence_s, max(0.0, left_s))):
                message = await self._call.read()
        except TimeoutError as error:
            self._call.cancel()
            raise CallFailed(self._target, _silence(silence_s, left_s)) from error
        except grpc.aio.AioRpcError as error:
            raise CallFailed(self._target, problem_of(error)) from error
        if isinstance(message, agent_pb2.SubmitResponse):
            return event_value(message.event)
        raise CallFailed(self._target, Problem(grpc.StatusCode.UNAVAILABLE, "the stream ended before the request did"))

    def cancel(self) -> None:
        """The client is gone: the request is cancelled everywhere. Harmless on an ended stream."""
        self._call.cancel()


def _silence(silence_s: float, left_s: float) -> Problem:
    if left_s < silence_s:
        return Problem(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's time is over")
    return Problem(grpc.StatusCode.UNAVAILABLE, f"silent for {silence_s:g} s")


class SubmitCalls:
    """Channels to agents by address, made when first needed, the longest unused closed beyond a bound."""

    def __init__(self) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def submit(
        self, address: str, request: Request, ticket: bytes, instance_id: str, metadata: Metadata = ()
    ) -> SubmitCall:
        """Open Submit at an agent; nothing is awaited."""
        message = submit_message(request, ticket, instance_id)
        return SubmitCall(address, self._stub(address).Submit(message, metadata=tuple(metadata)))

    async def close(self) -> None:
        """Close every channel; streams under way end."""
        channels = list(self._channels.values())
        self._channels.clear()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stub(self, address: str) -> agent_pb2_grpc.InstanceAgentAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = aio_channel(address)
            if len(self._channels) > _MAX_AGENT_CHANNELS:
                _, oldest = self._channels.popitem(last=False)
                task = asyncio.ensure_future(oldest.close(grace=_CHANNEL_GRACE_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._channels.move_to_end(address)
        return agent_pb2_grpc.InstanceAgentStub(channel)
