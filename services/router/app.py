"""Builds, starts and stops a router: the only place that joins clock, randomness, Redis, threads and server.

The asyncio loop of the main thread follows Redis; another thread serves calls; no `grpc.aio` runs beside the loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from redis.asyncio import Redis

from dualmap.rpc.admission import Admission
from dualmap.rpc.direct_calls import Queue
from dualmap.rpc.heat_client import HeatClient
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.server import ServerParts, SyncServer
from dualmap.runtime.background import running
from dualmap.runtime.health import Component, Health
from dualmap.runtime.logs import get_log
from dualmap.runtime.metrics import Exposition, new_registry
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from dualmap.runtime.redis_check import CHECK_REDIS_S, RedisCheck
from dualmap.runtime.redis_start import require_redis
from dualmap.runtime.telemetry import Telemetry, start_telemetry
from dualmap.store.connection import connect
from dualmap.store.packing import UnreadableValueError
from dualmap.view.cluster_view import ClusterView, ViewOptions
from dualmap.view.events import ViewEvent
from dualmap.view.follower import Follower
from dualmap.view.ring_file import RingFile
from services.router.calm_collector import CalmCollector
from services.router.decider import Decider, RouterFacts
from services.router.heat_reporter import HeatReporter
from services.router.heat_sampler import HeatSampler
from services.router.metrics import RouterMetrics
from services.router.servicer import RouterServicer, RouteStreams, register
from services.router.settings import Settings
from services.router.spans import RouteSpans
from services.router.view_metrics import ViewMetrics

EXPIRE_S = 0.25
WATCH_S = 0.25
COLLECT_S = 0.25
_THREADS = 2
"""For what an operator asks: Explain, GetView, health, reflection."""

_SWITCH_S = 0.001
"""A fifth of the interpreter's own 5 ms, which is ten times a call; less costs the background more than it gives."""

Announce = Callable[[Mapping[str, Any]], None]

_log = get_log("router")


def monotonic_ms() -> float:
    """This process's monotonic clock in milliseconds."""
    return time.monotonic() * 1000


class App:
    """One router; ``async with App(settings)`` serves until the block is left."""

    def __init__(self, settings: Settings, shared_port: bool = False) -> None:
        """``shared_port``: it is one of several workers on it."""
        self.settings = settings
        self._shared_port = shared_port
        self.port = 0
        self.metrics_port: int | None = None
        self.health = Health()
        self.router_id = secrets.randbits(64) or 1
        self.metrics = RouterMetrics(settings.pool.name)
        self.view = ClusterView(
            settings.pool.name,
            threading.Lock(),
            monotonic_ms,
            ViewOptions(self.router_id, float(settings.router.booking_ttl_ms)),
            _tell,
        )
        self._collector = CalmCollector(time.monotonic)
        self._registry = new_registry()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Telemetry, view, server, loops, in this order."""
        async with AsyncExitStack() as stack:
            await self._build(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """The reverse."""
        await self._stack.aclose()

    async def _build(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        telemetry = start_telemetry("router")
        stack.callback(telemetry.shutdown)
        self._registry.register(self.metrics)
        self._registry.register(ViewMetrics(self.view))
        if settings.metrics.port is not None:
            exposition = Exposition(self._registry, settings.metrics_host, settings.metrics.port, self.health)
            stack.callback(exposition.stop)
            self.metrics_port = exposition.port
        options = settings.redis.options("dualmap-router")
        # Two, so that the check waits for nobody's blocking read and a slow server is not taken for a lost one.
        client, patient = connect(options), connect(options.for_following())
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(patient.aclose)
        ring_file = _ring_file(settings)
        if not _usable(ring_file, settings.pool.name):
            await require_redis(client, settings.redis)
        per_report = settings.router.heat_samples_per_s * settings.router.heat_period_ms // 1000
        sampler = HeatSampler(max(1, per_report), random.random)
        decider = Decider(self.view, self._facts(), self.metrics, sampler, random.random)
        follower = Follower(self.view, patient, settings.pool.name, ring_file=ring_file)
        await self._start_loops(stack, client, follower, decider)
        self._start_heat(stack, sampler)
        await self._start_server(stack, decider, telemetry)
        self._prefer_calls(stack)

    def _prefer_calls(self, stack: AsyncExitStack) -> None:
        """A call waits for the switch interval where a follower or a report is busy, and for the collector's pauses."""
        sys.setswitchinterval(_SWITCH_S)
        self._collector.start()
        stack.callback(self._collector.stop)

    def _facts(self) -> RouterFacts:
        pool = self.settings.pool
        hash_key = pool.hash_key.get_secret_value().encode()
        return RouterFacts(self.router_id, pool.name, pool.models, hash_key, self.settings.router.choose_options)

    async def _start_server(self, stack: AsyncExitStack, decider: Decider, telemetry: Telemetry) -> None:
        settings = self.settings
        # Spans are made by hand: gRPC's interceptor would double the cost of a call.
        untraced = Telemetry(trace.NoOpTracerProvider())
        admission = Admission(settings.server.max_concurrent_rpcs, settings.router.burst_ms / 1000)
        server = SyncServer(
            settings.server,
            ServerParts(self.health, RpcMetrics(self._registry), untraced),
            _THREADS,
            self._shared_port,
            Queue(admission, decider.overloaded),
        )
        provider = telemetry.provider
        spans = RouteSpans(provider) if isinstance(provider, TracerProvider) else None
        servicer = RouterServicer(decider, spans)
        streams = RouteStreams(servicer, self.metrics, settings.router.max_streams)
        server.add(lambda one, registrar: register(one, streams, registrar), servicer)
        sigterm = self.health.component("sigterm")
        self.port = server.start()
        sigterm.ok()

        async def stop() -> None:
            sigterm.fail("stopping")
            streams.end()
            # The stop blocks for the grace; the loop follows Redis meanwhile.
            await asyncio.to_thread(server.stop)

        stack.push_async_callback(stop)

    def _start_heat(self, stack: AsyncExitStack, sampler: HeatSampler) -> None:
        addresses = self.settings.router.ring_managers
        if not addresses:
            return
        client = HeatClient(addresses, self.settings.pool.name)
        reporter = HeatReporter(self.view, sampler, client, self.metrics, self.router_id)
        reporter.start(self.settings.router.heat_period_ms / 1000)
        stack.callback(reporter.stop)

    async def _start_loops(self, stack: AsyncExitStack, client: Redis, follower: Follower, decider: Decider) -> None:
        loops = PeriodicMetrics(self._registry)
        vital = self.health.component("loops", gates=False, vital=True)
        watch = _Watch(self.view, self.health)
        redis_check = RedisCheck(
            client,
            self.health.component("redis_config", gates=False),
            lambda: self.metrics.count("redis_misconfigured"),
        )

        async def expire() -> None:
            decider.expire()

        for name, work, period_s in (
            ("expire", expire, EXPIRE_S),
            ("watch", watch.turn, WATCH_S),
            ("collector", self._collector.turn, COLLECT_S),
            ("redis_config", redis_check.turn, CHECK_REDIS_S),
        ):
            loop = Periodic(name, work, Schedule(period_s), loops)
            await stack.enter_async_context(running(name, loop.run, vital))
        await stack.enter_async_context(running("follower", follower.run, vital))


class _Watch:
    """Says in health what the view has."""

    def __init__(self, view: ClusterView, health: Health) -> None:
        self._view = view
        # Redis gone is no error for a caller while a view is held.
        self._redis = health.component("redis", gates=False)
        self._ring = health.component("ring")
        self._seen = health.component("view")
        self._was_seen = False

    async def turn(self) -> None:
        """Look once."""
        view = self._view
        from_file = view.counts[ViewEvent.STARTED_FROM_FILE] > 0
        self._was_seen = self._was_seen or (view.ready and (not view.degraded or from_file))
        _say(self._redis, "does not answer, or holds no ring" if view.degraded else None)
        _say(self._ring, None if view.ring is not None else "no ring is known yet")
        _say(self._seen, None if self._was_seen else "no state was read yet")


def _tell(event: ViewEvent, about: str) -> None:
    _log.warning("view_event", kind=event.value, about=about)


def _say(component: Component, problem: str | None) -> None:
    if problem is None:
        component.ok()
    else:
        component.fail(problem)


async def serve(settings: Settings, stop: asyncio.Event, announce: Announce, shared_port: bool = False) -> None:
    """Serve until ``stop``; ``announce`` is told once where."""
    _log.info("settings", **settings.printable())
    async with App(settings, shared_port) as app:
        announce({"event": "serving", "port": app.port, "metrics_port": app.metrics_port})
        await stop.wait()


def _ring_file(settings: Settings) -> RingFile | None:
    path = settings.router.ring_file
    return RingFile(path) if path is not None else None


def _usable(ring_file: RingFile | None, pool: str) -> bool:
    """Whether a router can start from the file, degraded, should Redis not answer."""
    try:
        return ring_file is not None and ring_file.load(pool) is not None
    except (OSError, UnreadableValueError) as error:
        _log.warning("ring_file_unusable", error=str(error))
        return False
