"""One held stream an instance for the collector's polls: each poll is a question and its answer, with its own deadline.

A stream that broke since the last poll is opened anew at once; an agent that knows no streams is asked by unary calls.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from dualmap.rpc.status import problem_of
from dualmap.v1 import agent_pb2, agent_pb2_grpc


class StreamEndedError(Exception):
    """The stream ended instead of answering; ``kind`` is a gRPC code's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_Stream = grpc.aio.StreamStreamCall[agent_pb2.PollStateRequest, agent_pb2.PollStateResponse]


class StateStreams:
    """Held streams by agent and instance. One poll of an instance at a time."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], _Stream] = {}
        self._unary: set[str] = set()

    def streams(self, address: str) -> bool:
        """Whether the agent may know streams."""
        return address not in self._unary

    async def poll(
        self,
        stub: agent_pb2_grpc.InstanceAgentAsyncStub,
        address: str,
        query: agent_pb2.GetStateRequest,
        timeout_s: float,
    ) -> agent_pb2.GetStateResponse:
        """One question and its answer. Raises StreamEndedError, UNIMPLEMENTED where the agent knows no streams."""
        key = (address, query.instance_id)
        stream = self._held.pop(key, None)
        if stream is None or stream.done():
            stream = stub.PollState()
        try:
            answer = await _asked(stream, query, timeout_s)
        except StreamEndedError as error:
            if error.kind == "UNIMPLEMENTED":
                self._unary.add(address)
            raise
        self._held[key] = stream
        return answer

    def forget(self, address: str) -> None:
        """End the streams to this address."""
        self._unary.discard(address)
        for key in [key for key in self._held if key[0] == address]:
            self._held.pop(key).cancel()


async def _asked(stream: _Stream, query: agent_pb2.GetStateRequest, timeout_s: float) -> agent_pb2.GetStateResponse:
    answer = None
    try:
        async with asyncio.timeout(timeout_s):
            await stream.write(agent_pb2.PollStateRequest(query=query))
            answer = await stream.read()
    except TimeoutError:
        raise StreamEndedError("DEADLINE_EXCEEDED", "no answer in time") from None
    except grpc.aio.AioRpcError as error:
        problem = problem_of(error)
        raise StreamEndedError(problem.code.name, problem.message) from error
    except asyncio.InvalidStateError as error:
        raise StreamEndedError("UNAVAILABLE", "the stream had ended") from error
    finally:
        if not isinstance(answer, agent_pb2.PollStateResponse):
            # Also where the poll itself was cancelled: its answer must not be taken for the next one's.
            stream.cancel()
    if not isinstance(answer, agent_pb2.PollStateResponse):
        raise StreamEndedError(*await _end_of(stream))
    return answer.state


async def _end_of(stream: Any) -> tuple[str, str]:
    code = await stream.code()
    kind = code.name if code is not grpc.StatusCode.OK else "UNAVAILABLE"
    return kind, await stream.details() or "the stream ended"
