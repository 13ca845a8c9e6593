"""Channels to our own services: keepalive, message sizes, tracing; a unary call without a timeout is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from opentelemetry.instrumentation.grpc import aio_client_interceptors, client_interceptor

from dualmap.rpc.traced_calls import traced_at_caller
from dualmap.runtime.telemetry import Telemetry

ROUTER_MESSAGE_BYTES = 4 * 1024 * 1024
AGENT_MESSAGE_BYTES = 32 * 1024 * 1024

C = TypeVar("C", grpc.Channel, grpc.aio.Channel)


def channel_options(max_message_bytes: int = AGENT_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of every channel; a dead peer is noticed within 75 s, a restarted one met again within a second."""
    return [
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 15_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def aio_channel(
    target: str, telemetry: Telemetry | None = None, max_message_bytes: int = AGENT_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel for the running loop; connects at its first call. Close it with ``await channel.close()``."""
    interceptors = []
    if telemetry is not None and telemetry.enabled:
        interceptors = aio_client_interceptors(telemetry.provider, traced_at_caller)
    channel = grpc.aio.insecure_channel(target, channel_options(max_message_bytes), interceptors=interceptors)
    return _require_timeouts(channel)


def sync_channel(
    target: str, telemetry: Telemetry | None = None, max_message_bytes: int = AGENT_MESSAGE_BYTES
) -> grpc.Channel:
    """A channel for threads; connects at its first call. Close it with ``channel.close()``."""
    channel = grpc.insecure_channel(target, channel_options(max_message_bytes))
    if telemetry is not None and telemetry.enabled:
        channel = grpc.intercept_channel(channel, client_interceptor(telemetry.provider, traced_at_caller))
    return _require_timeouts(channel)


class _TimedCall:
    """A unary call that refuses to be made without a timeout: gRPC's own default is to wait for ever."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        return self._call(request, timeout=_checked(timeout), **options)

    def with_call(self, request: Any, timeout: float | None = None, **options: Any) -> Any:
        """The sync stack's form that also gives the call."""
        return self._call.with_call(request, timeout=_checked(timeout), **options)


def _checked(timeout: float | None) -> float:
    if timeout is None:
        raise ValueError("every unary call passes timeout=, in seconds")
    return timeout


def _require_timeouts(channel: C) -> C:
    # A wrapped method costs nothing a call; an interceptor would cost the asyncio stack a task each.
    unary_unary = cast("Callable[..., Any]", channel.unary_unary)
    setattr(channel, "unary_unary", lambda *method, **codecs: _TimedCall(unary_unary(*method, **codecs)))  # noqa: B010
    return channel
