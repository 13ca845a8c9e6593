"""Builds, starts and stops a ring manager: the only place that joins clock, Redis, loops and server."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from secrets import token_hex
from types import TracebackType
from typing import Self

from redis.asyncio import Redis

from dualmap.core.heat_tree import HeatOptions
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.server import AioServer, ServerParts
from dualmap.runtime.background import running
from dualmap.runtime.health import Health
from dualmap.runtime.leadership import LeaderCallbacks, Leadership, LeaseTerms
from dualmap.runtime.logs import get_log
from dualmap.runtime.metrics import Exposition, new_registry
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from dualmap.runtime.redis_check import CHECK_REDIS_S, RedisCheck, misconfigured_counter
from dualmap.runtime.redis_start import require_redis
from dualmap.runtime.telemetry import start_telemetry
from dualmap.store.connection import StoreError, connect
from dualmap.store.leases import RedisLeases
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from services.ringmanager.heat import HeatRules
from services.ringmanager.keeper import KeeperRules, Lead, RingKeeper
from services.ringmanager.metrics import RingManagerMetrics
from services.ringmanager.publisher import Publisher, Stores
from services.ringmanager.servicer import RingManagerServicer, register
from services.ringmanager.settings import Settings

LEASE_NAME = "ringmanager"
FIND_LEADER_S = 1.0

_log = get_log("ringmanager")


class App:
    """One ring manager; ``async with App(settings)`` serves until the block is left."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self.metrics_port: int | None = None
        self.health = Health()
        self._registry = new_registry()
        self.metrics = RingManagerMetrics(self._registry, settings.pool.name)
        self._stack = AsyncExitStack()
        self._leadership: Leadership | None = None
        self._leader: str | None = None

    async def __aenter__(self) -> Self:
        """Telemetry, Redis, keeper, server, loops, in this order."""
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
        return self._leadership is not None and self._leadership.is_leader

    async def _build(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        telemetry = start_telemetry("ringmanager")
        stack.callback(telemetry.shutdown)
        if settings.metrics.port is not None:
            exposition = Exposition(self._registry, settings.metrics_host, settings.metrics.port, self.health)
            stack.callback(exposition.stop)
            self.metrics_port = exposition.port
        client = connect(settings.redis.options("dualmap-ringmanager"))
        stack.push_async_callback(client.aclose)
        await require_redis(client, settings.redis)
        keeper = self._keeper(client)
        # Every agent holds a watch open: they must not use up what Join and Renew need.
        limits = settings.server.model_copy(
            update={"max_concurrent_rpcs": settings.server.max_concurrent_rpcs + settings.ring.max_watches}
        )
        server = AioServer(limits, ServerParts(self.health, RpcMetrics(self._registry), telemetry))
        register(server, RingManagerServicer(settings.pool.name, keeper))
        self.port = await server.start()
        stack.push_async_callback(server.stop)
        stack.callback(keeper.watchers.close)
        await self._start_loops(stack, client, keeper)

    def _keeper(self, client: Redis) -> RingKeeper:
        settings, pool = self.settings, self.settings.pool.name
        heat = HeatOptions(
            max_nodes=settings.heat.max_nodes,
            half_life_s=settings.heat.half_life_s,
            dwell_s=settings.heat.dwell_s,
            min_samples=settings.heat.min_samples,
        )
        rules = KeeperRules(
            pool=pool,
            parameters=settings.parameters,
            default_ttft_slo_ms=settings.pool.ttft_slo_ms,
            grace_s=settings.ring.grace_s,
            heartbeat_s=settings.ring.heartbeat_s,
            most_watches=settings.ring.max_watches,
            leases=settings.lease.rules,
            heat=HeatRules(settings.heat.enabled, settings.heat.plan_s, heat),
        )
        # Reads are answered from memory and changes with UNAVAILABLE: a Redis away must not hide this process.
        stores = Stores(RingStore(client, pool), StateStore(client, pool), self.health.component("redis", gates=False))
        return RingKeeper(
            rules,
            Publisher(stores, lambda: time.time_ns() // 1_000_000),
            Lead(lambda: self._leadership.epoch if self._leadership else None, lambda: self._leader),
            self.metrics,
            time.monotonic,
        )

    async def _start_loops(self, stack: AsyncExitStack, client: Redis, keeper: RingKeeper) -> None:
        settings = self.settings
        loops = PeriodicMetrics(self._registry)
        vital = self.health.component("loops", gates=False, vital=True)
        ready = self.health.component("ring")
        leases = RedisLeases(client, settings.pool.name)

        async def turn() -> None:
            if await keeper.turn():
                ready.ok()

        async def find_leader() -> None:
            owner = await _holder(leases)
            self._leader = owner.partition("#")[0] if owner else None

        redis_check = RedisCheck(
            client, self.health.component("redis_config", gates=False), misconfigured_counter(self._registry)
        )
        for name, work, period_s in (
            ("ring", turn, settings.lease.turn_s),
            ("leader", find_leader, FIND_LEADER_S),
            ("redis_config", redis_check.turn, CHECK_REDIS_S),
        ):
            loop = Periodic(name, work, Schedule(period_s), loops)
            await stack.enter_async_context(running(name, loop.run, vital))
        ttl_ms = round(settings.leader_lease_s * 1000)
        terms = LeaseTerms(
            LEASE_NAME, f"{settings.server.reachable_host}:{self.port}#{token_hex(8)}", ttl_ms, ttl_ms // 5, ttl_ms // 6
        )
        self._leadership = Leadership(leases, terms, LeaderCallbacks(_gained, _lost, self.metrics.lease_failures.inc))
        await stack.enter_async_context(running("leadership", self._leadership.run, vital))


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; one JSON line on stdout says where."""
    _log.info("settings", **settings.printable())
    async with App(settings) as app:
        line = {"event": "serving", "port": app.port, "metrics_port": app.metrics_port}
        print(json.dumps(line), flush=True)  # noqa: T201  (parents find the ports by it)
        await stop.wait()


async def _holder(leases: RedisLeases) -> str | None:
    try:
        return await leases.holder(LEASE_NAME)
    except StoreError as error:
        _log.debug("leader_unknown", error=type(error).__name__)
        return None


# The keeper sees the fencing epoch change at its next turn or call; nothing is left to do here.
async def _gained(_epoch: int) -> None: ...


async def _lost() -> None: ...
