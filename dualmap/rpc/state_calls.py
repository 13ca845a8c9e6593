"""The collector's call to agents, in values. Bounds time and size of an answer; judges nothing in it."""

from __future__ import annotations

import asyncio
from typing import Self

import grpc
import grpc.aio

from dualmap.core.errors import InvalidRequest
from dualmap.core.state import StateUpdate
from dualmap.rpc.clients import AGENT_MESSAGE_BYTES, aio_channel
from dualmap.rpc.convert_state import StateQuery, query_message, update_of
from dualmap.rpc.state_streams import StateStreams, StreamEndedError
from dualmap.rpc.status import problem_of
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import agent_pb2, agent_pb2_grpc


class StateCallError(Exception):
    """An agent gave no usable answer. ``kind``: a gRPC code's name, INVALID for an answer that contradicts itself."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class StateCalls:
    """Channels to agents by address, shared by an agent's instances, made when first needed."""

    def __init__(
        self, telemetry: Telemetry | None = None, max_answer_bytes: int = AGENT_MESSAGE_BYTES, *, held: bool = False
    ) -> None:
        """``max_answer_bytes``: a longer answer is refused before it is held in memory.

        ``held``: an instance's polls share one stream, where its agent knows streams: at most one poll at a time.
        """
        self._held = held
        self._streams = StateStreams()
        self._telemetry = telemetry
        self._max_answer_bytes = max_answer_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}
        # A stub makes every method's call object: as dear as all of a poll's conversion.
        self._stubs: dict[str, agent_pb2_grpc.InstanceAgentAsyncStub] = {}

    async def get_state(self, address: str, query: StateQuery, timeout_s: float) -> StateUpdate:
        """One poll, over within ``timeout_s`` whatever the agent does. Raises StateCallError."""
        try:
            update = update_of((await self._ask(address, query, timeout_s)).update)
        except StreamEndedError as error:
            raise StateCallError(error.kind, str(error)) from error
        except grpc.aio.AioRpcError as error:
            problem = problem_of(error)
            raise StateCallError(problem.code.name, problem.message) from error
        except InvalidRequest as error:
            raise StateCallError("INVALID", error.message) from error
        if update.instance_id != query.instance_id:
            raise StateCallError("INVALID", f"asked for {query.instance_id!r}, told of {update.instance_id!r}")
        return update

    async def _ask(self, address: str, query: StateQuery, timeout_s: float) -> agent_pb2.GetStateResponse:
        stub = self._stub(address)
        message = query_message(query)
        if self._held and self._streams.streams(address):
            try:
                return await self._streams.poll(stub, address, message, timeout_s)
            except StreamEndedError as error:
                if error.kind != "UNIMPLEMENTED":
                    raise
        return await stub.GetState(message, timeout=timeout_s)

    async def keep(self, addresses: frozenset[str]) -> None:
        """Close the channels to agents that are polled no more."""
        gone = [address for address in self._channels if address not in addresses]
        for address in gone:
            self._streams.forget(address)
            del self._stubs[address]
        await asyncio.gather(*(self._channels.pop(address).close() for address in gone))

    async def close(self) -> None:
        """Close every channel."""
        await self.keep(frozenset())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stub(self, address: str) -> agent_pb2_grpc.InstanceAgentAsyncStub:
        stub = self._stubs.get(address)
        if stub is None:
            channel = self._channels[address] = aio_channel(address, self._telemetry, self._max_answer_bytes)
            stub = self._stubs[address] = agent_pb2_grpc.InstanceAgentStub(channel)
        return stub
