"""An agent's GetState and PollState alone, in values: for stand-ins that have state and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from dualmap.core.state import StateUpdate
from dualmap.rpc.clients import AGENT_MESSAGE_BYTES
from dualmap.rpc.convert_state import StateQuery, query_of, state_message
from dualmap.v1 import agent_pb2

SERVICE = agent_pb2.DESCRIPTOR.services_by_name["InstanceAgent"].full_name

Answer = Callable[[StateQuery], Awaitable[StateUpdate]]
"""Raises KeyError for an instance that is not here."""


async def serve_states(answer: Answer) -> tuple[grpc.aio.Server, int]:
    """Serve on any free loopback port: the server, to be stopped by the caller, and the port."""

    async def poll_state(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(agent_pb2.PollStateResponse(state=await get_state(request.query, context)))

    async def get_state(request: agent_pb2.GetStateRequest, context: Any) -> agent_pb2.GetStateResponse:
        try:
            return state_message(0, await answer(query_of(request)))
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no instance {request.instance_id!r} here")
            raise

    handlers: dict[str, Any] = {
        "GetState": grpc.unary_unary_rpc_method_handler(
            get_state,
            request_deserializer=agent_pb2.GetStateRequest.FromString,
            response_serializer=agent_pb2.GetStateResponse.SerializeToString,
        ),
        "PollState": grpc.stream_stream_rpc_method_handler(
            poll_state,
            request_deserializer=agent_pb2.PollStateRequest.FromString,
            response_serializer=agent_pb2.PollStateResponse.SerializeToString,
        ),
    }
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_send_message_length", AGENT_MESSAGE_BYTES)))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port
