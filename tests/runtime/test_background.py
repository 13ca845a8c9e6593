"""Tasks beside their owner: ended with it, and never missing in silence."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from dualmap.runtime.background import running
from dualmap.runtime.health import Health
from dualmap.runtime.redis_check import RedisCheck, misconfigured_counter
from dualmap.store.connection import connect


async def test_a_task_ends_with_its_block_and_stays_healthy() -> None:
    """Leaving the block sets the stop and waits for the end."""
    health = Health()
    ended = False

    async def run(stop: asyncio.Event) -> None:
        nonlocal ended
        await stop.wait()
        ended = True

    async with running("loop", run, health.component("loops", gates=False, vital=True)):
        await asyncio.sleep(0)
    assert ended
    assert health.alive


async def test_a_task_that_dies_turns_the_process_red() -> None:
    """A loop that is gone must be seen, and its error does not hide the owner's end."""
    health = Health()

    async def run(_stop: asyncio.Event) -> None:
        raise RuntimeError("defect")

    async with running("loop", run, health.component("loops", gates=False, vital=True)):
        async with asyncio.timeout(5):
            while health.alive:
                await asyncio.sleep(0)
    assert not health.alive


async def test_a_misconfigured_redis_is_red_and_counted(redis_url: str) -> None:
    """Eviction would lose state: said, not refused."""
    client = connect(redis_url)
    registry, health = CollectorRegistry(), Health()
    check = RedisCheck(client, health.component("redis_config"), misconfigured_counter(registry))
    try:
        await check.turn()
        assert health.summary()["redis_config"]
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await check.turn()
        assert not health.summary()["redis_config"]
        assert registry.get_sample_value("dualmap_redis_misconfigured_total") == 1
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.aclose()


async def test_an_absent_redis_is_red_and_not_an_error() -> None:
    """The check goes on the next minute."""
    client = connect("redis://127.0.0.1:1/0")
    health = Health()
    try:
        await RedisCheck(client, health.component("redis_config"), misconfigured_counter(CollectorRegistry())).turn()
        assert not health.ready
    finally:
        await client.aclose()
