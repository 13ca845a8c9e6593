"""An agent's calls to a ring manager, in values: join, renew, drain, leave, and the ring as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio

from dualmap.core.membership import InstanceState, RingSnapshot
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_ring import Join, Renew, join_to_message, ring_from_message, state_of
from dualmap.rpc.status import Problem, problem_of
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import ring_pb2, ring_pb2_grpc


class RingCallError(Exception):
    """A call to a ring manager failed; ``problem`` is its status."""

    def __init__(self, address: str, problem: Problem) -> None:
        super().__init__(f"ring manager {address}: {problem.code.name}: {problem.message}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Joined:
    """The outcome of a join."""

    ring: RingSnapshot | None
    lease_ms: int
    state: InstanceState


@dataclass(frozen=True, slots=True)
class Renewed:
    """What the ring manager thinks of the instances, in the order asked."""

    states: tuple[InstanceState, ...]
    lease_ms: int
    ring_epoch: int


class RingCalls:
    """One ring manager at one address."""

    def __init__(self, address: str, pool: str, telemetry: Telemetry | None = None) -> None:
        self.address = address
        self._pool = pool
        self._channel = aio_channel(address, telemetry)
        self._stub = ring_pb2_grpc.RingManagerStub(self._channel)

    async def join(self, join: Join, timeout_s: float) -> Joined:
        """Bring an instance in. Raises RingCallError."""
        try:
            answer = await self._stub.Join(join_to_message(self._pool, join), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        ring = ring_from_message(answer.ring) if answer.HasField("ring") else None
        return Joined(ring, answer.lease_ms, state_of(answer.state))

    async def renew(self, renew: Renew, timeout_s: float) -> Renewed:
        """Keep the leases. Raises RingCallError."""
        message = ring_pb2.RenewRequest(
            pool=self._pool,
            instances=[
                ring_pb2.RenewInstance(instance_id=renewal.instance_id, suspect=renewal.suspect)
                for renewal in renew.renewals
            ],
            agent_epoch=renew.agent_epoch,
            highest_epoch_seen=renew.highest_epoch_seen,
        )
        try:
            answer = await self._stub.Renew(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        states = tuple(state_of(state) for state in answer.states)
        return Renewed(states, answer.lease_ms, answer.ring_epoch)

    async def drain(self, instance_id: str, timeout_s: float) -> None:
        """Stop new work for an instance. Raises RingCallError."""
        request = ring_pb2.DrainRequest(pool=self._pool, instance_id=instance_id)
        try:
            await self._stub.Drain(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error

    async def leave(self, instance_id: str, agent_epoch: int, timeout_s: float) -> None:
        """Take an instance off the ring. Raises RingCallError."""
        request = ring_pb2.LeaveRequest(pool=self._pool, instance_id=instance_id, agent_epoch=agent_epoch)
        try:
            await self._stub.Leave(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error

    async def watch(self, known_epoch: int, silence_s: float) -> AsyncGenerator[RingSnapshot, None]:
        """The ring now and at each change. Raises RingCallError when the stream fails, ends or is silent."""
        call = self._stub.WatchRing(ring_pb2.WatchRingRequest(pool=self._pool, known_epoch=known_epoch))
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    message = await call.read()
                if not isinstance(message, ring_pb2.WatchRingResponse):
                    raise self._ended("the stream ended")
                if message.HasField("ring"):
                    yield ring_from_message(message.ring)
        except TimeoutError as error:
            raise self._ended(f"silent for {silence_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _failed(self, error: grpc.aio.AioRpcError) -> RingCallError:
        return RingCallError(self.address, problem_of(error))

    def _ended(self, message: str) -> RingCallError:
        return RingCallError(self.address, Problem(grpc.StatusCode.UNAVAILABLE, message))
