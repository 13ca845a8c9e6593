"""Looks at Redis's configuration once a minute: a red health component and a counter, never a refusal."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from redis.asyncio import Redis

from dualmap.runtime.health import Component
from dualmap.store.connection import StoreError, server_problems

CHECK_REDIS_S = 60.0


class RedisCheck:
    """One server's check; `turn` is for a periodic loop."""

    def __init__(self, client: Redis, health: Component, registry: CollectorRegistry) -> None:
        self._client = client
        self._health = health
        self._misconfigured = Counter(
            "dualmap_redis_misconfigured", "Checks that found Redis misconfigured.", registry=registry
        )

    async def turn(self) -> None:
        """Check once."""
        try:
            problems = await server_problems(self._client)
        except StoreError as error:
            self._health.fail(f"not checked: {type(error).__name__}")
            return
        if problems:
            self._misconfigured.inc()
            self._health.fail("; ".join(problems))
        else:
            self._health.ok()
