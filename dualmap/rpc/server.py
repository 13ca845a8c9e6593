"""gRPC servers, asyncio and thread-pool: limits, health, reflection, tracing, error mapping, graceful stop.

A stop says NOT_SERVING first, then sets ``stopping`` (endless streams must watch it), then gives calls their grace.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.instrumentation.grpc import aio_server_interceptor, server_interceptor

from dualmap.rpc.direct_calls import Answer, DirectCalls, Queue, StreamHandler
from dualmap.rpc.health import AioHealthServicer, SyncHealthServicer
from dualmap.rpc.interceptors import Handler, RpcMetrics, wrap_handlers
from dualmap.rpc.traced_calls import traced
from dualmap.rpc.written_streams import WrittenStreams
from dualmap.runtime.health import Health
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.settings import ServerSettings
from dualmap.runtime.telemetry import Telemetry

S = TypeVar("S")
Registration = Callable[[S, Any], None]
"""A generated ``add_…Servicer_to_server``."""

_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# Half of the clients' 60 s: a ping that comes early by jitter is not punished.
_LEAST_PING_INTERVAL_MS = 30_000
_LEAST_PENDING = 4_096


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What a server shares with the rest of its process."""

    health: Health
    metrics: RpcMetrics
    telemetry: Telemetry


class AioServer:
    """An asyncio server; made, started and stopped in one loop."""

    def __init__(self, settings: ServerSettings, parts: ServerParts) -> None:
        self.stopping = asyncio.Event()
        self.port = 0
        self._settings = settings
        self._health = parts.health
        self._metrics = parts.metrics
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if parts.telemetry.enabled:
            interceptors += [WrittenStreams(), aio_server_interceptor(parts.telemetry.provider, traced)]
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=server_options(settings),
            maximum_concurrent_rpcs=settings.max_concurrent_rpcs,
        )
        self._names: list[str] = []

    def add(self, register: Registration[S], servicer: S) -> None:
        """Serve one more service; before `start`."""
        register(servicer, _Registrar(self._server, self._metrics, self._names))

    async def start(self) -> int:
        """Listen and serve; gives the port. Raises StartError in one line when the port cannot be had."""
        servicer = AioHealthServicer(self._health, self.stopping, self._names)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        reflection.enable_server_reflection(_reflected(self._names), self._server)
        self.port = _bind(self._server.add_insecure_port, self._settings)
        await self._server.start()
        return self.port

    async def stop(self) -> None:
        """NOT_SERVING, end the streams, wait for the calls within the grace, cancel the rest."""
        self._health.stop()
        self.stopping.set()
        # One turn of the loop: watchers hear NOT_SERVING before their stream ends.
        await asyncio.sleep(0)
        await self._server.stop(self._settings.drain_grace_s)


class SyncServer:
    """A thread-pool server, for short unary calls; each open stream holds one of ``threads``.

    With a ``queue`` a service may register methods that need no thread of the pool (`dualmap.rpc.direct_calls`).
    """

    def __init__(
        self,
        settings: ServerSettings,
        parts: ServerParts,
        threads: int,
        shared_port: bool = False,
        queue: Queue | None = None,
    ) -> None:
        """``shared_port``: other processes of ours listen there too, and who starts them holds the port."""
        self.stopping = threading.Event()
        self.port = 0
        self._settings = settings
        self._shared_port = shared_port
        self._health = parts.health
        self._metrics = parts.metrics
        interceptors = []
        if parts.telemetry.enabled:
            interceptors.append(server_interceptor(parts.telemetry.provider, traced))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=interceptors,
            options=server_options(settings, shared_port),
            maximum_concurrent_rpcs=settings.max_concurrent_rpcs,
        )
        self._names: list[str] = []
        self._servicer = SyncHealthServicer(parts.health, self._names)
        self._direct = DirectCalls(self._server, queue) if queue is not None else None

    def add(self, register: Registration[S], servicer: S) -> None:
        """Serve one more service; before `start`."""
        register(servicer, _Registrar(self._server, self._metrics, self._names, self._direct))

    def start(self) -> int:
        """Listen and serve; gives the port. Raises StartError in one line when the port cannot be had."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        reflection.enable_server_reflection(_reflected(self._names), self._server)
        self.port = _bind(self._server.add_insecure_port, self._settings, self._shared_port)
        (self._direct or self._server).start()
        return self.port

    def stop(self) -> None:
        """NOT_SERVING, end the streams, wait for the calls within the grace, cancel the rest. Blocks until done."""
        self._health.stop()
        self.stopping.set()
        self._servicer.end_watches()
        self._server.stop(self._settings.drain_grace_s).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Registrar:
    """Stands for the server while a service registers, and wraps its handlers on the way."""

    def __init__(
        self,
        server: grpc.Server | grpc.aio.Server,
        metrics: RpcMetrics,
        names: list[str],
        direct: DirectCalls | None = None,
    ) -> None:
        self._server = server
        self._metrics = metrics
        self._names = names
        self._direct = direct

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Nothing: generated code hands the same handlers over by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Register the wrapped handlers both ways, as generated code does."""
        wrapped = wrap_handlers(service, handlers, self._metrics)
        server = cast("Any", self._server)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
        server.add_registered_method_handlers(service, wrapped)
        self._names.append(service)

    def add_direct(
        self, service: str, unaries: Mapping[str, Answer], streams: Mapping[str, StreamHandler] | None = None
    ) -> None:
        """Register methods over bytes that need no thread; raises ValueError where the server was given no queue."""
        if self._direct is None:
            raise ValueError("this server has no queue for direct calls")
        for name, answer in unaries.items():
            method = f"/{service}/{name}"
            self._direct.add_unary(method, answer, self._metrics.of(method))
        for name, handler in (streams or {}).items():
            method = f"/{service}/{name}"
            self._direct.add_stream(method, handler, self._metrics.of(method))


def server_options(settings: ServerSettings, shared_port: bool = False) -> list[tuple[str, int]]:
    """Options of every server of ours."""
    return [
        # On by default, and then a second process takes half of the calls in silence.
        ("grpc.so_reuseport", int(shared_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        # Of a burst beyond 1,000 gRPC cancels at random, without a word: what we refuse is RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", max(_LEAST_PENDING, settings.max_concurrent_rpcs)),
        ("grpc.server.max_pending_requests_hard_limit", max(_LEAST_PENDING, settings.max_concurrent_rpcs)),
    ]


def _reflected(names: list[str]) -> tuple[str, ...]:
    return (*names, _HEALTH_SERVICE, reflection.SERVICE_NAME)


@contextmanager
def hold_port(settings: ServerSettings) -> Iterator[int]:
    """Reserve the port for processes of ours that share it; it takes no connection itself. Raises StartError."""
    _refuse_taken(settings)
    with socket.socket(_family(settings), socket.SOCK_STREAM) as held:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind((settings.host, settings.port))
        yield held.getsockname()[1]


def _family(settings: ServerSettings) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in settings.host else socket.AF_INET


def _bind(add_port: Callable[[str], int], settings: ServerSettings, shared_port: bool = False) -> int:
    if not shared_port:
        _refuse_taken(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        port = add_port(address)
    except RuntimeError as error:
        raise StartError(f"gRPC port {address} is in use, or not ours to take") from error
    if port == 0:
        raise StartError(f"gRPC port {address} is in use, or not ours to take")
    return port


def _refuse_taken(settings: ServerSettings) -> None:
    """Ask the kernel first: gRPC would write lines of its own about a port in use."""
    if settings.port == 0:
        return
    try:
        socket.create_server((settings.host, settings.port), family=_family(settings)).close()
    except OSError as error:
        problem = "is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise StartError(f"gRPC port {settings.host}:{settings.port} {problem}") from error
