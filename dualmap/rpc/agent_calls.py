"""Calls from one agent to another, in values: Accept streams, offers, pulls. Knows addresses, not whose they are."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Self

import grpc
import grpc.aio

from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_agent import accept_message, outcome_of
from dualmap.rpc.convert_offer import OfferBatch, PullOrder, offer_message, pull_message
from dualmap.rpc.request_events import AcceptOutcome, MoveOutcome
from dualmap.rpc.status import Problem, problem_of
from dualmap.rpc.submission import Handover, Submission
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import agent_pb2, agent_pb2_grpc


class PeerLostError(Exception):
    """A call to another agent failed, fell silent or ended early; ``problem`` is its status where there is one."""

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class AcceptCall:
    """One Accept stream, read by one task."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[agent_pb2.AcceptRequest, agent_pb2.AcceptResponse]) -> None:
        self._call = call

    async def next(self, silence_s: float) -> AcceptOutcome:
        """The next message. Raises PeerLostError on a failed or ended stream, or after ``silence_s`` without one."""
        try:
            async with asyncio.timeout(silence_s):
                message = await self._call.read()
        except TimeoutError as error:
            self._call.cancel()
            raise PeerLostError(f"silent for {silence_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            problem = problem_of(error)
            raise PeerLostError(f"{problem.code.name}: {problem.message}", problem) from error
        except asyncio.CancelledError:
            # gRPC raises it too where the call itself was cancelled under us.
            if (task := asyncio.current_task()) is not None and not task.cancelling() and self._call.cancelled():
                raise PeerLostError("the call was cancelled") from None
            raise
        if isinstance(message, agent_pb2.AcceptResponse):
            return outcome_of(message)
        raise PeerLostError("the stream ended")

    def cancel(self) -> None:
        """Let the target drop the request; harmless on an ended stream."""
        self._call.cancel()


class AgentCalls:
    """Channels to other agents by address, made when first needed, closed with the agent."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def accept(self, address: str, submission: Submission, handover: Handover) -> AcceptCall:
        """Open Accept; nothing is awaited, the first message tells whether it was accepted."""
        metadata = (("traceparent", handover.traceparent),) if handover.traceparent else None
        return AcceptCall(self._stub(address).Accept(accept_message(submission, handover), metadata=metadata))

    async def offer(self, address: str, batch: OfferBatch, timeout_s: float) -> int:
        """Tell a target what waits here; gives how many it kept. Raises PeerLostError."""
        try:
            response = await self._stub(address).Offer(offer_message(batch), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            problem = problem_of(error)
            raise PeerLostError(problem.message, problem) from error
        return response.kept

    async def pull(self, address: str, order: PullOrder, timeout_s: float) -> MoveOutcome:
        """Ask a holder for a request, which then arrives by Accept. Raises PeerLostError."""
        try:
            response = await self._stub(address).Pull(pull_message(order), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            problem = problem_of(error)
            raise PeerLostError(problem.message, problem) from error
        return MoveOutcome(response.outcome) if response.outcome else MoveOutcome.FAILED

    def forget(self, known_addresses: frozenset[str]) -> None:
        """Close channels to agents that are not on the ring any more and that nothing uses."""
        for address in [name for name in self._channels if name not in known_addresses]:
            self._close(self._channels.pop(address))

    async def close(self) -> None:
        """Close every channel; calls under way end."""
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stub(self, address: str) -> agent_pb2_grpc.InstanceAgentAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = aio_channel(address, self._telemetry)
        self._channels.move_to_end(address)
        return agent_pb2_grpc.InstanceAgentStub(channel)

    def _close(self, channel: grpc.aio.Channel) -> None:
        # A grace: relays over it end by themselves first.
        task = asyncio.ensure_future(channel.close(grace=_CHANNEL_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


_CHANNEL_GRACE_S = 30.0
