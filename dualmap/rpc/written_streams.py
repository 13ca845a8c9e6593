"""Answers streamed by writing: the tracing's generators are run and closed in the call's own task.

grpc leaves an answering generator where it stands when the caller goes while a message is being sent; the event loop
then closes it in another task, whose context cannot take back what the tracing attached in the first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
import grpc.aio

from dualmap.rpc.interceptors import AioContext, Behaviour, Handler


class WrittenStreams(grpc.aio.ServerInterceptor):
    """The outermost interceptor: it must come before those whose generators it closes."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Give a handler that writes its answers, where the method streams them."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return cast(
            "Handler",
            make(
                _writing(getattr(handler, kind)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            ),
        )


def _writing(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: AioContext) -> None:
        async with aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return call
