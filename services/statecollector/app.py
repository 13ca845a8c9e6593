"""Builds, starts and stops a state collector: the only place that joins clock, Redis, pollers and server."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from secrets import token_hex
from types import TracebackType
from typing import Self

from redis.asyncio import Redis

from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.server import AioServer, ServerParts
from dualmap.rpc.state_calls import StateCalls
from dualmap.runtime.background import running
from dualmap.runtime.clock import SystemClock
from dualmap.runtime.health import Health
from dualmap.runtime.logs import get_log
from dualmap.runtime.metrics import Exposition, new_registry
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from dualmap.runtime.redis_check import CHECK_REDIS_S, RedisCheck, misconfigured_counter
from dualmap.runtime.redis_start import require_redis
from dualmap.runtime.telemetry import start_telemetry
from dualmap.store.connection import connect
from dualmap.store.leases import CollectorRegister
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from services.statecollector.change_feed import ChangeFeed
from services.statecollector.directory import Directory
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.poller import Outside
from services.statecollector.roster import Roster, Shares
from services.statecollector.servicer import StateCollectorServicer, register
from services.statecollector.settings import Settings

_log = get_log("statecollector")


class App:
    """One collector; ``async with App(settings)`` serves until the block is left."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.port = 0
        self.metrics_port: int | None = None
        self.health = Health()
        self._registry = new_registry()
        self._metrics = CollectorMetrics(self._registry, settings.pool.name)
        self._stack = AsyncExitStack()
        self._roster: Roster | None = None
        self._redis_check: RedisCheck | None = None

    @property
    def roster(self) -> Roster:
        """Who is polled here. Raises RuntimeError before the start."""
        if self._roster is None:
            raise RuntimeError("the collector has not started")
        return self._roster

    @property
    def redis_check(self) -> RedisCheck:
        """The check of Redis's configuration. Raises RuntimeError before the start."""
        if self._redis_check is None:
            raise RuntimeError("the collector has not started")
        return self._redis_check

    async def __aenter__(self) -> Self:
        """Telemetry, Redis, pollers, server, loops, in this order."""
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
        telemetry = start_telemetry("statecollector")
        stack.callback(telemetry.shutdown)
        if settings.metrics.port is not None:
            exposition = Exposition(self._registry, settings.metrics_host, settings.metrics.port, self.health)
            stack.callback(exposition.stop)
            self.metrics_port = exposition.port
        options = settings.redis.options("dualmap-statecollector")
        client, patient = connect(options), connect(options.for_following())
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(patient.aclose)
        await require_redis(client, settings.redis)
        roster = self._roster = await self._make_roster(stack, client)
        directory = Directory(StateStore(client, settings.pool.name), roster, self._metrics)
        server = AioServer(settings.server, ServerParts(self.health, RpcMetrics(self._registry), telemetry))
        register(server, StateCollectorServicer(directory))
        self.port = await server.start()
        stack.push_async_callback(server.stop)
        # Before the server's grace: endless streams would use it up.
        stack.callback(directory.close)
        feed = ChangeFeed(StateStore(patient, settings.pool.name), roster, directory, self._metrics)
        await self._start_loops(stack, client, roster, feed)

    async def _make_roster(self, stack: AsyncExitStack, client: Redis) -> Roster:
        settings = self.settings
        pool, poll = settings.pool.name, settings.poll
        # Not traced: ten polls a second and instance would bury the requests' traces.
        calls = await stack.enter_async_context(
            StateCalls(max_answer_bytes=poll.max_answer_bytes, held=poll.held_streams)
        )
        store = StateStore(client, pool, gather_s=poll.gather_ms / 1_000)
        stack.push_async_callback(store.close)
        outside = Outside(calls, store, self._metrics, SystemClock())
        shares = Shares(
            token_hex(8), CollectorRegister(client, pool), RingStore(client, pool), settings.share, settings.poll
        )
        roster = Roster(shares, outside, self.health.component("redis"))
        stack.push_async_callback(roster.close)
        return roster

    async def _start_loops(self, stack: AsyncExitStack, client: Redis, roster: Roster, feed: ChangeFeed) -> None:
        vital = self.health.component("loops", gates=False, vital=True)
        loops = PeriodicMetrics(self._registry)
        redis_check = self._redis_check = RedisCheck(
            client, self.health.component("redis_config", gates=False), misconfigured_counter(self._registry)
        )
        for name, work, period_s in (
            ("roster", roster.turn, self.settings.share.beat_ms / 1_000),
            ("redis_config", redis_check.turn, CHECK_REDIS_S),
        ):
            loop = Periodic(name, work, Schedule(period_s), loops)
            await stack.enter_async_context(running(name, loop.run, vital))
        await stack.enter_async_context(running("change_feed", feed.run, vital))


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; one JSON line on stdout says where."""
    _log.info("settings", **settings.printable())
    async with App(settings) as app:
        line = {"event": "serving", "port": app.port, "metrics_port": app.metrics_port}
        print(json.dumps(line), flush=True)  # noqa: T201  (parents find the ports by it)
        await stop.wait()
