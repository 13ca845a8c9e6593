"""gRPC's health service over `dualmap.runtime.health`, by name: "" or a service: readiness; "liveness"; a component.

Watches end when the server stops, so that they never hold up its grace.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap.runtime.health import READINESS, Health

Answer = health_pb2.HealthCheckResponse
Send = Callable[[Answer | None], None]
"""Sends one message of a stream; None ends it."""


class AioHealthServicer(health_pb2_grpc.HealthServicer):
    """For an asyncio server; made inside its loop."""

    def __init__(self, health: Health, stopping: asyncio.Event, services: Collection[str] = ()) -> None:
        self._health = health
        self._services = services
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        health.watch(self._wake_threadsafe)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Answer:
        """How the named part is now; NOT_FOUND for a name not in use."""
        status = _status(self._health, self._services, request.service)
        if status == Answer.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such component")
        return Answer(status=status)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: Any,  # noqa: ARG002  (the contract's)
    ) -> AsyncIterator[Answer]:
        """The same now and after each change, until the server stops."""
        last = None
        while True:
            changed = self._changed
            status = _status(self._health, self._services, request.service)
            if status != last:
                last = status
                yield Answer(status=status)
            if self._stopping.is_set():
                return
            await changed.wait()

    def wake(self) -> None:
        """Let every watcher look again; in the loop's own thread."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _wake_threadsafe(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.wake)


class SyncHealthServicer(health_pb2_grpc.HealthServicer):
    """For a thread-pool server; a watcher holds no thread."""

    def __init__(self, health: Health, services: Collection[str] = ()) -> None:
        self._health = health
        self._services = services
        self._lock = threading.Lock()
        self._watchers: dict[Send, tuple[str, int | None]] = {}
        self._ended = False
        health.watch(self._tell)

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Answer:
        """How the named part is now; NOT_FOUND for a name not in use."""
        status = _status(self._health, self._services, request.service)
        if status == Answer.SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such component")
        return Answer(status=status)

    def Watch(  # type: ignore[override]  # gRPC's non-blocking form
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.ServicerContext,
        send: Send,
    ) -> None:
        """The same now and after each change, until the server stops."""
        with self._lock:
            if self._ended:
                send(None)
                return
            self._watchers[send] = (request.service, None)
        context.add_callback(lambda: self._forget(send))
        self._tell()

    Watch.experimental_non_blocking = True  # type: ignore[attr-defined]

    def end_watches(self) -> None:
        """End every watch; new ones end at once."""
        with self._lock:
            self._ended = True
            watchers = tuple(self._watchers)
            self._watchers.clear()
        for send in watchers:
            send(None)

    def _forget(self, send: Send) -> None:
        with self._lock:
            self._watchers.pop(send, None)

    def _tell(self) -> None:
        with self._lock:
            for send, (service, last) in tuple(self._watchers.items()):
                status = _status(self._health, self._services, service)
                if status != last:
                    self._watchers[send] = (service, status)
                    send(Answer(status=status))


def _status(health: Health, services: Collection[str], name: str) -> int:
    # Balancers and probes ask by the service they call.
    well = health.summary().get(READINESS if name in services else name)
    if well is None:
        return Answer.SERVICE_UNKNOWN
    return Answer.SERVING if well else Answer.NOT_SERVING
