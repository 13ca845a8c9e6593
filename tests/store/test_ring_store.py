"""The published ring on a real server: who may publish, what comes back, how followers learn of it."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.store.connection import connect
from dualmap.store.ring_store import PublishResult, RingStore

BIG = 2**63 + 5


def ring(epoch: int, grace_left_ms: int = 30_000) -> RingSnapshot:
    members = (
        Member("a/0", "127.0.0.1:1", "127.0.0.1:2", InstanceState.ACTIVE, 1.5, BIG, "m"),
        Member("a/1", "127.0.0.1:1", state=InstanceState.DRAINING),
    )
    splits = (Split(BIG, 1, 3),)
    previous = PreviousRing(max(epoch - 1, 0), members[:1], splits, grace_left_ms)
    return RingSnapshot("p", epoch, RingParameters(start_depth=2), members, splits, 4_000, previous)


async def test_a_published_ring_comes_back_whole(client: Redis) -> None:
    """What followers load is what the leader published, 64-bit numbers included; only the grace period runs down."""
    store = RingStore(client, "p")

    outcome = await store.publish(ring(BIG), fencing_epoch=1, expected_epoch=0)
    loaded = await store.load()

    assert outcome.published
    assert loaded is not None
    assert loaded.previous is not None
    assert 0 < loaded.previous.grace_left_ms <= 30_000
    assert loaded == ring(BIG, loaded.previous.grace_left_ms)
    assert await store.epoch() == BIG


async def test_a_grace_period_that_is_over_is_not_read_back(client: Redis) -> None:
    """A late follower does not get a previous ring whose caches have cooled."""
    store = RingStore(client, "p")
    await store.publish(ring(5, grace_left_ms=1), fencing_epoch=1)

    await asyncio.sleep(0.005)
    loaded = await store.load()

    assert loaded is not None
    assert loaded.previous is None


async def test_a_woken_stale_leader_is_refused(client: Redis) -> None:
    """A lower fencing epoch than one that published changes nothing, whatever epoch it brings."""
    store = RingStore(client, "p")
    await store.publish(ring(5), fencing_epoch=9)

    outcome = await store.publish(ring(6), fencing_epoch=8, expected_epoch=5)

    assert outcome.result is PublishResult.FENCED
    assert (outcome.stored_epoch, outcome.stored_fencing_epoch) == (5, 9)
    assert await store.epoch() == 5


async def test_epochs_never_fall_nor_stay(client: Redis) -> None:
    """An epoch that is not above the stored one is refused, also without an expected epoch."""
    store = RingStore(client, "p")
    await store.publish(ring(10), fencing_epoch=1)

    same = await store.publish(ring(10), fencing_epoch=2)
    lower = await store.publish(ring(9), fencing_epoch=2)

    assert {same.result, lower.result} == {PublishResult.NOT_RISING}


async def test_a_plan_made_from_another_epoch_is_refused(client: Redis) -> None:
    """Two writers from the same base: the second is told that the epoch moved."""
    store = RingStore(client, "p")
    await store.publish(ring(5), fencing_epoch=1, expected_epoch=0)

    outcomes = await asyncio.gather(
        *(store.publish(ring(epoch), fencing_epoch=1, expected_epoch=5) for epoch in range(6, 16))
    )

    results = [outcome.result for outcome in outcomes]
    assert results.count(PublishResult.PUBLISHED) == 1
    assert results.count(PublishResult.EPOCH_MOVED) == 9


async def test_a_follower_wakes_at_a_publication(client: Redis, redis_url: str) -> None:
    """Waiting on the stream ends with the publication, and nothing is missed between load and wait."""
    store = RingStore(client, "p")
    assert (await store.load_with_position()).ring is None
    await store.publish(ring(1), fencing_epoch=1)
    at = await store.load_with_position()
    await store.publish(ring(2), fencing_epoch=1)

    position, moved = await store.follow(at.position, block_ms=100)
    assert moved
    assert not (await store.follow(position, block_ms=10))[1]

    other = connect(redis_url)
    waiting = asyncio.create_task(RingStore(other, "p").follow(position, block_ms=250))
    await store.publish(ring(3), fencing_epoch=1)
    assert (await waiting)[1]
    await other.aclose()


async def test_pools_do_not_see_each_other(client: Redis) -> None:
    """Two pools on one server have rings of their own."""
    await RingStore(client, "p").publish(ring(5), fencing_epoch=1)

    assert await RingStore(client, "q").load() is None
