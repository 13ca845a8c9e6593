"""Builds, starts and stops a rebalancer: the only place that joins clock, Redis, view, loops and server."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack, nullcontext
from secrets import token_hex
from types import TracebackType
from typing import Self

from prometheus_client import Counter
from redis.asyncio import Redis

from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.queue_calls import QueueCalls
from dualmap.rpc.server import AioServer, ServerParts
from dualmap.runtime.background import running
from dualmap.runtime.health import Component, Health
from dualmap.runtime.leadership import LeaderCallbacks, Leadership, LeaseTerms
from dualmap.runtime.logs import get_log
from dualmap.runtime.metrics import Exposition, new_registry
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from dualmap.runtime.redis_check import CHECK_REDIS_S, RedisCheck, misconfigured_counter
from dualmap.runtime.redis_start import require_redis
from dualmap.runtime.telemetry import Telemetry, start_telemetry
from dualmap.store.connection import connect
from dualmap.store.leases import RedisLeases
from dualmap.view.cluster_view import ClusterView
from dualmap.view.events import ViewEvent
from dualmap.view.follower import Follower
from services.rebalancer.metrics import RebalancerMetrics
from services.rebalancer.rounds import Outside, Rounds
from services.rebalancer.servicer import RebalancerServicer, register
from services.rebalancer.settings import Settings

LEASE_NAME = "rebalancer"
HEALTH_S = 0.25

_log = get_log("rebalancer")


class App:
    """One rebalancer; ``async with App(settings)`` serves until the block is left."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self.metrics_port: int | None = None
        self.health = Health()
        self._registry = new_registry()
        self._metrics = RebalancerMetrics(self._registry, settings.pool.name)
        self._stack = AsyncExitStack()
        self._leadership: Leadership | None = None

    async def __aenter__(self) -> Self:
        """Telemetry, Redis, view, rounds, server, loops, in this order."""
        async with AsyncExitStack() as stack:
            await self._build(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """The reverse."""
        await self._stack.aclose()

    @property
    def is_leader(self) -> bool:
        """Whether this process leads now."""
        return self._fencing_epoch() is not None

    async def _build(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        telemetry = start_telemetry("rebalancer")
        stack.callback(telemetry.shutdown)
        if settings.metrics.port is not None:
            exposition = Exposition(self._registry, settings.metrics_host, settings.metrics.port, self.health)
            stack.callback(exposition.stop)
            self.metrics_port = exposition.port
        options = settings.redis.options("dualmap-rebalancer")
        # Two, so that renewals wait for nobody's blocking read and a slow server is not taken for a lost one.
        client, patient = connect(options), connect(options.for_following())
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(patient.aclose)
        await require_redis(client, settings.redis)
        view = self._view()
        agents = await stack.enter_async_context(QueueCalls(telemetry))
        rounds = self._rounds(view, agents, telemetry)
        server = AioServer(settings.server, ServerParts(self.health, RpcMetrics(self._registry), telemetry))
        register(server, RebalancerServicer(settings.pool.name, rounds))
        self.port = await server.start()
        stack.push_async_callback(server.stop)
        await self._start_loops(stack, client, Follower(view, patient, settings.pool.name), rounds)

    def _view(self) -> ClusterView:
        events = Counter(
            "dualmap_rebalancer_view_events", "What befell the view.", ["pool", "reason"], registry=self._registry
        )

        def count(event: ViewEvent, _about: str) -> None:
            events.labels(pool=self.settings.pool.name, reason=str(event)).inc()

        # One loop fills and reads it: there is nothing to lock.
        return ClusterView(self.settings.pool.name, nullcontext(), lambda: time.monotonic() * 1_000, on_event=count)

    def _rounds(self, view: ClusterView, agents: QueueCalls, telemetry: Telemetry) -> Rounds:
        outside = Outside(view, agents, self._fencing_epoch, time.monotonic, telemetry.tracer("dualmap.rebalancer"))
        return Rounds(self.settings.rebalance, outside, self._metrics)

    def _fencing_epoch(self) -> int | None:
        return self._leadership.epoch if self._leadership is not None else None

    async def _start_loops(self, stack: AsyncExitStack, client: Redis, follower: Follower, rounds: Rounds) -> None:
        settings, view = self.settings, follower.view
        vital = self.health.component("loops", gates=False, vital=True)
        loops = PeriodicMetrics(self._registry)
        ring, redis = self.health.component("ring", gates=False), self.health.component("redis", gates=False)
        redis_check = RedisCheck(
            client, self.health.component("redis_config", gates=False), misconfigured_counter(self._registry)
        )

        async def show_health() -> None:
            _show(view, ring, redis)

        await stack.enter_async_context(running("follower", follower.run, vital))
        for name, work, period_s in (
            ("rounds", rounds.turn, settings.rebalance.period_ms / 1_000),
            ("health", show_health, HEALTH_S),
            ("redis_config", redis_check.turn, CHECK_REDIS_S),
        ):
            loop = Periodic(name, work, Schedule(period_s), loops)
            await stack.enter_async_context(running(name, loop.run, vital))
        ttl_ms = round(settings.leader_lease_s * 1000)
        owner = f"{settings.server.reachable_host}:{self.port}#{token_hex(8)}"
        terms = LeaseTerms(LEASE_NAME, owner, ttl_ms, ttl_ms // 5, ttl_ms // 6)
        leases = RedisLeases(client, settings.pool.name)
        self._leadership = Leadership(leases, terms, LeaderCallbacks(_gained, _lost, self._metrics.lease_failures.inc))
        await stack.enter_async_context(running("leadership", self._leadership.run, vital))


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; one JSON line on stdout says where."""
    _log.info("settings", **settings.printable())
    async with App(settings) as app:
        line = {"event": "serving", "port": app.port, "metrics_port": app.metrics_port}
        print(json.dumps(line), flush=True)  # noqa: T201  (parents find the ports by it)
        await stop.wait()


def _show(view: ClusterView, ring: Component, redis: Component) -> None:
    if view.ready:
        ring.ok()
    else:
        ring.fail("no ring yet")
    if view.degraded:
        redis.fail("the view does not follow Redis")
    else:
        redis.ok()


# Each round reads the fencing epoch; there is nothing to build up or tear down.
async def _gained(_epoch: int) -> None: ...


async def _lost() -> None: ...
