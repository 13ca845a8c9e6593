"""Damaged keys and a server that takes nothing: what is damaged is put right, and nobody else suffers."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from dualmap.core.kv_index import pack_change
from dualmap.core.membership import RingParameters, RingSnapshot
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.store.connection import RedisOptions, StoreError, connect
from dualmap.store.keys import SHARDS, shard_of
from dualmap.store.leases import CollectorRegister, RedisLeases
from dualmap.store.packing import UnreadableValueError
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from dualmap.store.state_writer import ALONE_BYTES
from dualmap.store.streams import START


def of_one_shard(count: int) -> list[str]:
    names = (f"a/{number}" for number in range(1_000))
    return [name for name in names if shard_of(name) == shard_of("a/0")][:count]


def whole(name: str, version: int = 1) -> StateUpdate:
    return StateUpdate(name, 1, 1, version, 0, LoadReport(), KvSnapshot())


def step(name: str, since: int, version: int, changes: bytes = b"") -> StateUpdate:
    return StateUpdate(name, 1, 1, version, since, LoadReport(rest_s=version), None, changes)


async def test_a_damaged_state_costs_its_own_instance_one_whole_poll_and_its_neighbours_nothing(client: Redis) -> None:
    """Written together with a state of another type, the others are taken; the damaged one begins anew."""
    store = StateStore(client, "p")
    damaged, *others = of_one_shard(5)
    for name in (damaged, *others):
        await store.write(whole(name))
    await client.set(store.keys.state(damaged), "nonsense")
    assert set(await store.heads([damaged, *others])) == set(others)
    with pytest.raises(UnreadableValueError):
        await store.load([damaged])

    outcomes = await asyncio.gather(*(store.write(step(name, 1, 2)) for name in (damaged, *others)))

    assert [bool(outcome) for outcome in outcomes] == [False] + [True] * 4
    assert outcomes[0].stored is None
    assert await store.write(whole(damaged, 3))
    heads = await store.heads([damaged, *others])
    assert [heads[name].base.version for name in (damaged, *others)] == [3, 2, 2, 2, 2]


@pytest.mark.parametrize("kind", ["stream", "added", "instances"])
async def test_a_damaged_key_of_a_shard_is_put_right_by_the_next_whole_state(client: Redis, kind: str) -> None:
    """Whatever lies where the shard's stream, counter or set should be makes way for them."""
    store = StateStore(client, "p")
    shard = shard_of("a/0")
    key = getattr(store.keys, kind)(shard)
    await store.write(whole("a/0"))
    await client.delete(key)
    await client.zadd(key, {"nonsense": 1})
    await store.known_instances()
    await store.positions()

    assert await store.write(whole("a/0", 2))
    assert await store.write(step("a/0", 2, 3, pack_change(7, 1)))
    assert await store.rewrite(whole("a/0", 3))

    assert await store.known_instances() == {"a/0"}
    entries = await store.read_stream({shard: START}, block_ms=0)
    assert entries[-1].change is not None
    assert entries[-1].change.version == 3


@pytest.mark.parametrize("kind", ["ring", "epochs"])
async def test_a_damaged_ring_is_as_good_as_none_and_can_be_published_again(client: Redis, kind: str) -> None:
    """Its epoch is 0, loading finds nothing, and the next publication is stored and wakes the followers."""
    store = RingStore(client, "p")
    await client.set(getattr(store.keys, kind), "nonsense")

    assert await store.epoch() == 0
    assert await store.load() is None
    await client.set(getattr(store.keys, kind), "nonsense")
    published = await store.publish(RingSnapshot("p", 5, RingParameters()), fencing_epoch=1, expected_epoch=0)

    assert published.published
    assert await store.epoch() == 5
    assert (await store.follow(START, block_ms=5))[1]


async def test_damaged_leases_and_registers_make_way(client: Redis) -> None:
    """Somebody can lead and collect again, whatever lies there."""
    leases, register = RedisLeases(client, "p"), CollectorRegister(client, "p")
    for key in (leases.keys.lease("x"), leases.keys.fence("x"), leases.keys.collectors):
        await client.rpush(key, "nonsense")

    epoch = await leases.acquire("x", "me", 1_000)

    assert epoch is not None
    assert await leases.renew("x", "me", epoch, 1_000)
    assert await register.beat("c", 1_000) == ("c",)


@pytest.mark.parametrize("held", ["nonsense", "5 somebody"])
async def test_a_lease_that_names_nobody_or_never_ends_is_free(client: Redis, held: str) -> None:
    """Or else nobody would ever lead again."""
    leases = RedisLeases(client, "p")
    await client.set(leases.keys.lease("x"), held)
    await client.set(leases.keys.fence("x"), "nonsense")

    assert await leases.acquire("x", "me", 1_000) is not None
    assert await leases.acquire("x", "another", 1_000) is None


async def test_a_full_server_refuses_each_write_and_takes_them_once_there_is_room(client: Redis) -> None:
    """Under noeviction a full memory is an error to each writer, reads go on, and nothing is half written."""
    store = StateStore(client, "p")
    names = [f"a/{number}" for number in range(20)]
    for name in names:
        await store.write(whole(name))
    await client.config_set("maxmemory", "1")
    try:
        outcomes = await asyncio.gather(*(store.write(step(name, 1, 2)) for name in names), return_exceptions=True)
        heads = await store.heads(names)
    finally:
        await client.config_set("maxmemory", "0")

    assert all(isinstance(outcome, StoreError) for outcome in outcomes)
    assert {head.base.version for head in heads.values()} == {1}
    assert all(await asyncio.gather(*(store.write(step(name, 1, 2)) for name in names)))
    assert len(await store.read_stream(dict.fromkeys(range(SHARDS), START), block_ms=0)) == 40


async def test_writes_that_travel_together_are_judged_each_by_itself(client: Redis) -> None:
    """Of many at once, over all shards, those on their base are taken and the others told what is stored."""
    store = StateStore(client, "p", gather_s=0.005)
    names = [f"a/{number}" for number in range(100)]
    first = await asyncio.gather(*(store.write(whole(name)) for name in names))

    calls = [store.write(step(name, number % 2, 2)) for number, name in enumerate(names)]
    second = await asyncio.gather(*calls)

    assert all(first)
    assert [bool(outcome) for outcome in second] == [number % 2 == 1 for number in range(100)]
    assert {outcome.stored.version for outcome in second if outcome.stored} == {1}


async def test_a_big_update_travels_alone(client: Redis) -> None:
    """It neither waits for the gathering nor makes the others wait for its bytes."""
    store = StateStore(client, "p", gather_s=60)
    blocks = ALONE_BYTES // 8
    hashes = b"".join(number.to_bytes(8, "little") for number in range(1, blocks + 1))
    big = StateUpdate("a/0", 1, 1, 1, 0, LoadReport(), KvSnapshot(hashes, b"\1" * blocks), kv_blocks=blocks)

    async with asyncio.timeout(5):
        assert await store.write(big)


async def test_who_gives_up_waiting_stops_nobody_else(client: Redis) -> None:
    """A writer that is cancelled is left out; those it was gathered with are written; a close waits for all."""
    store = StateStore(client, "p", gather_s=0.01)
    gone, stays = asyncio.create_task(store.write(whole("a/0"))), asyncio.create_task(store.write(whole("a/1")))
    await asyncio.sleep(0)
    gone.cancel()

    await store.close()

    assert await stays
    assert set(await store.heads(["a/0", "a/1"])) == {"a/1"}


async def test_without_a_server_each_writer_is_told() -> None:
    """No one waits for an answer that cannot come."""
    away = connect(RedisOptions("unix:///nowhere/r.sock", retries=0))
    store = StateStore(away, "p", gather_s=0.005)

    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*(store.write(whole(f"a/{n}")) for n in range(20)), return_exceptions=True)

    assert all(isinstance(outcome, StoreError) for outcome in outcomes)
    await away.aclose()
