"""The check of the server's configuration, the client's bounds, and the names of keys."""

from __future__ import annotations

import time

import pytest
from redis.asyncio import Redis

from dualmap.store.connection import FOLLOWING_TIMEOUT_S, RedisOptions, StoreError, connect, server_problems
from dualmap.store.keys import SHARDS, PoolKeys, shard_of


async def test_a_suitable_server_has_no_problem(client: Redis) -> None:
    """What the tests and the compose file run is what the check wants."""
    assert await server_problems(client) == ()


async def test_a_server_that_evicts_is_named(client: Redis) -> None:
    """Any policy but noeviction loses keys under memory pressure."""
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (problem,) = await server_problems(client)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")

    assert "allkeys-lru" in problem


async def test_an_old_server_is_named() -> None:
    """Commands of 7.0 are needed."""

    class OldServer:
        async def info(self) -> dict[str, str]:
            return {"redis_version": "6.2.14", "maxmemory_policy": "noeviction"}

    (problem,) = await server_problems(OldServer())  # type: ignore[arg-type]

    assert "6.2.14" in problem


async def test_a_server_that_is_away_fails_soon() -> None:
    """A call to a server that is not there ends in the store's error within its bounds."""
    client = connect(RedisOptions("redis://127.0.0.1:1/0", socket_timeout_s=0.1, connect_timeout_s=0.1))
    began_s = time.monotonic()

    with pytest.raises(StoreError):
        await client.ping()

    assert time.monotonic() - began_s < 5
    await client.aclose()


def test_a_following_client_is_patient_and_otherwise_the_same() -> None:
    """Only the wait for an answer grows, and never shrinks."""
    options = RedisOptions("redis://h/0", socket_timeout_s=0.3)

    assert options.for_following() == RedisOptions("redis://h/0", socket_timeout_s=FOLLOWING_TIMEOUT_S)
    assert RedisOptions("u", socket_timeout_s=9).for_following().socket_timeout_s == 9


def test_keys_that_a_script_touches_share_a_hash_tag() -> None:
    """All keys of one script lie in one slot, so that a cluster would take them."""
    keys = PoolKeys("p")
    name = "agent/3"
    shard = shard_of(name)
    tag = f"{{dm:p:s{shard}}}"

    assert 0 <= shard < SHARDS
    for key in (keys.state(name), keys.stream(shard), keys.added(shard), keys.instances(shard)):
        assert key.startswith(tag)
    for key in (keys.ring, keys.epochs, keys.lease("x"), keys.fence("x"), keys.collectors):
        assert key.startswith("{dm:p:ring}")


@pytest.mark.parametrize("pool", ["", "a b", "a}b", "a:b", "x" * 65])
def test_a_pool_name_cannot_leave_its_keys(pool: str) -> None:
    """A name that would break the hash tag or reach another pool's keys is refused."""
    with pytest.raises(ValueError, match="pool name"):
        PoolKeys(pool)
