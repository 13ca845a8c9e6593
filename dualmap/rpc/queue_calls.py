"""The rebalancer's calls to agents, in values: what waits, and one batch of moves. Chooses no agent and no move."""

from __future__ import annotations

import asyncio
from typing import Self

import grpc
import grpc.aio

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_rebalance import (
    LIST_LIMIT,
    MigrateBatch,
    QueueList,
    list_request,
    migrate_message,
    outcomes_of,
    queue_list_of,
)
from dualmap.rpc.request_events import MoveOutcome
from dualmap.rpc.status import Problem, problem_of
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import agent_pb2_grpc


class QueueCallError(Exception):
    """An agent did not answer as it should; ``problem`` is the call's status."""

    def __init__(self, address: str, problem: Problem) -> None:
        super().__init__(f"agent {address}: {problem.code.name}: {problem.message}")
        self.problem = problem


class QueueCalls:
    """Channels to the agents by address, made when first needed."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def list_queue(self, address: str, instance_id: str, suspect: bool, timeout_s: float) -> QueueList:
        """What waits at an instance, in the order of its queue. Raises QueueCallError."""
        request = list_request(instance_id, LIST_LIMIT)
        try:
            answer = await self._stub(address).ListQueue(request, timeout=timeout_s)
            return queue_list_of(answer, instance_id, suspect)
        except grpc.aio.AioRpcError as error:
            raise QueueCallError(address, problem_of(error)) from error
        except InvalidRequest as error:
            raise QueueCallError(address, Problem(grpc.StatusCode.INTERNAL, error.message, error.reason)) from error

    async def migrate(self, address: str, batch: MigrateBatch, timeout_s: float) -> tuple[MoveOutcome | None, ...]:
        """Ask a source to hand its batch over; what came of each, in order. Raises QueueCallError."""
        try:
            answer = await self._stub(address).Migrate(migrate_message(batch), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise QueueCallError(address, problem_of(error)) from error
        return outcomes_of(answer, batch.moves)

    async def keep(self, addresses: frozenset[str]) -> None:
        """Close the channels to agents that are on the ring no more."""
        gone = [address for address in self._channels if address not in addresses]
        await asyncio.gather(*(self._channels.pop(address).close() for address in gone))

    async def close(self) -> None:
        """Close every channel."""
        await self.keep(frozenset())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stub(self, address: str) -> agent_pb2_grpc.InstanceAgentAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = aio_channel(address, self._telemetry)
        return agent_pb2_grpc.InstanceAgentStub(channel)
