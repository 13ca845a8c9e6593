"""Looks at Redis's configuration once a minute: a red health component and a counter, never a refusal."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter
from redis.asyncio import Redis

from dualmap.runtime.health import Component
from dualmap.store.connection import StoreError, server_problems

CHECK_REDIS_S = 60.0


class RedisCheck:
    """One server's check; `turn` is for a periodic loop. ``count`` is called for each check that finds a problem."""

    def __init__(self, client: Redis, health: Component, count: Callable[[], None]) -> None:
        self._client = client
        self._health = health
        self._count = count

    async def turn(self) -> None:
        """Check once."""
        try:
            problems = await server_problems(self._client)
        except StoreError as error:
            self._health.fail(f"not checked: {type(error).__name__}")
            return
        if problems:
            self._count()
            self._health.fail("; ".join(problems))
        else:
            self._health.ok()


def misconfigured_counter(registry: CollectorRegistry) -> Callable[[], None]:
    """What counts the checks that found a problem, for services without a counter of their own."""
    return Counter("dualmap_redis_misconfigured", "Checks that found Redis misconfigured.", registry=registry).inc
