"""`InstanceAgent` on the wire: messages in and out, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

from dualmap.rpc.convert_agent import (
    accept_from_wire,
    accept_of,
    event_message,
    listing_message,
    migration_message,
    migration_of,
    outcome_message,
    outcome_value,
    submission_of,
    submit_from_wire,
)
from dualmap.rpc.convert_offer import offer_of, pull_of
from dualmap.rpc.convert_state import query_of, state_message
from dualmap.rpc.request_events import Accepted, GaveWay, Returned
from dualmap.rpc.server import AioServer
from dualmap.v1 import agent_pb2, agent_pb2_grpc
from services.instanceagent.agent import Agent
from services.instanceagent.planning import Planning

_TRACEPARENT = "traceparent"

# gRPC's context is generic over the messages of each method; nothing here depends on them.
Context = grpc.aio.ServicerContext[Any, Any]


def register(server: AioServer, servicer: InstanceAgentServicer) -> None:
    """Serve it; before the server starts."""
    server.add(_add, servicer)


def _add(servicer: InstanceAgentServicer, server: Any) -> None:
    agent_pb2_grpc.add_InstanceAgentServicer_to_server(servicer, cast("grpc.aio.Server", _Strict(server)))


class _Strict:
    """Registers the methods that bring a prompt with readers that notice two prompts in one message."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Nothing: the same handlers come by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Pass them on, Submit and Accept with their own readers."""
        for name, reader in (("Submit", submit_from_wire), ("Accept", accept_from_wire)):
            handlers[name] = grpc.unary_stream_rpc_method_handler(
                handlers[name].unary_stream, reader, handlers[name].response_serializer
            )
        self._server.add_registered_method_handlers(service, handlers)


class InstanceAgentServicer(agent_pb2_grpc.InstanceAgentServicer):
    """Serves the instances of one agent."""

    def __init__(self, agent: Agent, planning: Planning) -> None:
        self._agent = agent
        self._planning = planning
        self._polls: set[asyncio.Task[Any] | None] = set()

    async def Submit(
        self, request: agent_pb2.SubmitRequest, context: Context
    ) -> AsyncIterator[agent_pb2.SubmitResponse]:
        """Run a request."""
        submission = submission_of(request, self._agent.defaults)
        async for event in self._agent.submit(submission, _traceparent(context)):
            if not isinstance(event, Accepted | Returned | GaveWay):
                yield agent_pb2.SubmitResponse(event=event_message(event))

    async def Accept(
        self,
        request: agent_pb2.AcceptRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[agent_pb2.AcceptResponse]:
        """Take a request of another agent."""
        submission, handover = accept_of(request, self._agent.defaults)
        async for outcome in self._agent.accept(submission, handover):
            yield outcome_message(outcome)

    async def GetState(
        self,
        request: agent_pb2.GetStateRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_pb2.GetStateResponse:
        """State since a version."""
        return await self._state(request)

    async def PollState(
        self,
        request_iterator: AsyncIterator[agent_pb2.PollStateRequest],
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[agent_pb2.PollStateResponse]:
        """The same on a held stream, until the caller ends it or the process stops."""
        task = asyncio.current_task()
        self._polls.add(task)
        try:
            async for request in request_iterator:
                yield agent_pb2.PollStateResponse(state=await self._state(request.query))
        finally:
            self._polls.discard(task)

    def end_polls(self) -> None:
        """End the held streams: the process stops, and they would use up the server's grace."""
        for task in self._polls:
            if task is not None:
                task.cancel()

    async def _state(self, request: agent_pb2.GetStateRequest) -> agent_pb2.GetStateResponse:
        query = query_of(request)
        instance = self._agent.instance(query.instance_id)
        base = (query.incarnation, query.agent_epoch, query.since_version)
        if query.wait_ms and not query.full:
            await instance.state.wait_for_change(base, query.wait_ms / 1_000)
        return state_message(self._planning.ring_epoch, instance.state.update(base, instance.load(), full=query.full))

    async def ListQueue(
        self,
        request: agent_pb2.ListQueueRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_pb2.ListQueueResponse:
        """What waits."""
        return listing_message(self._planning.list_queue(request.instance_id, request.limit))

    async def Migrate(
        self,
        request: agent_pb2.MigrateRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_pb2.MigrateResponse:
        """Hand a batch over."""
        return migration_message(self._planning.ring_epoch, await self._planning.migrate(migration_of(request)))

    async def Offer(
        self,
        request: agent_pb2.OfferRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_pb2.OfferResponse:
        """Note offers."""
        return agent_pb2.OfferResponse(
            ring_epoch=self._planning.ring_epoch, kept=self._planning.offer(offer_of(request))
        )

    async def Pull(
        self,
        request: agent_pb2.PullRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_pb2.PullResponse:
        """Hand an offered request over."""
        outcome = await self._planning.pull(pull_of(request))
        return agent_pb2.PullResponse(ring_epoch=self._planning.ring_epoch, outcome=outcome_value(outcome))


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == _TRACEPARENT and isinstance(value, str):
            return value
    return ""
