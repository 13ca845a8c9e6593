"""Leases and collector shares on a real server, races tried on purpose."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from dualmap.runtime.leadership import LeaseStore
from dualmap.store.leases import CollectorRegister, RedisLeases, share_owner
from tests.waiting import until


async def test_one_of_many_gets_the_lease(client: Redis) -> None:
    """Twenty candidates at once: exactly one leads, and the holder is told by name."""
    leases: LeaseStore = RedisLeases(client, "p")

    epochs = await asyncio.gather(*(leases.acquire("ring", f"owner-{number}", 1_000) for number in range(20)))

    winners = [number for number, epoch in enumerate(epochs) if epoch is not None]
    assert len(winners) == 1
    assert await RedisLeases(client, "p").holder("ring") == f"owner-{winners[0]}"


async def test_each_fencing_epoch_is_higher(client: Redis) -> None:
    """A new leader always outranks the old one, also after release, and also when the server lost its data."""
    leases = RedisLeases(client, "p")
    first = await leases.acquire("ring", "a", 1_000)
    assert first is not None
    await leases.release("ring", "a", first)
    second = await leases.acquire("ring", "b", 1_000)
    again = await leases.acquire("ring", "b", 1_000)
    await client.flushall()
    await asyncio.sleep(0.005)
    after_loss = await leases.acquire("ring", "c", 1_000)

    assert second is not None
    assert again is not None
    assert after_loss is not None
    assert first < second < again < after_loss


async def test_only_the_holder_renews_and_releases(client: Redis) -> None:
    """Another owner, or the same one with an older epoch, can neither prolong nor end a lease."""
    leases = RedisLeases(client, "p")
    epoch = await leases.acquire("ring", "a", 1_000)
    assert epoch is not None

    await leases.release("ring", "b", epoch)
    await leases.release("ring", "a", epoch - 1)

    assert not await leases.renew("ring", "b", epoch, 1_000)
    assert not await leases.renew("ring", "a", epoch - 1, 1_000)
    assert await leases.renew("ring", "a", epoch, 1_000)
    assert await leases.acquire("ring", "b", 1_000) is None
    await leases.release("ring", "a", epoch)
    assert await leases.holder("ring") is None


async def test_a_lease_ends_by_itself(client: Redis) -> None:
    """A holder that died gives way when its time is over, and cannot renew what it lost."""
    leases = RedisLeases(client, "p")
    epoch = await leases.acquire("ring", "a", 20)
    assert epoch is not None

    async def taken_over() -> bool:
        return await leases.acquire("ring", "b", 1_000) is not None

    await until(taken_over)

    assert not await leases.renew("ring", "a", epoch, 1_000)


async def test_a_silent_collector_is_forgotten(client: Redis) -> None:
    """Live collectors see each other; one that stops beating or leaves is gone for the rest."""
    register = CollectorRegister(client, "p")
    await register.beat("a", 10_000)
    await register.beat("b", 20)
    assert await register.beat("c", 10_000) in {("a", "b", "c"), ("a", "c")}

    async def forgotten() -> bool:
        return "b" not in await register.beat("a", 10_000)

    await until(forgotten)
    await register.leave("c")

    assert await register.beat("a", 10_000) == ("a",)


async def test_a_server_whose_clock_was_set_back_forgets_dead_collectors_all_the_same(client: Redis) -> None:
    """A registration that ends hours from now was made by another clock: its owner, if alive, beats again."""
    register = CollectorRegister(client, "p")
    seconds, _ = await client.time()
    await client.zadd(register.key, {"dead": (seconds + 7_200) * 1_000})

    assert await register.beat("a", 60_000) == ("a",)
    assert await register.beat("b", 1_200) == ("a", "b")


def test_a_collector_that_leaves_moves_only_its_own_share() -> None:
    """Every instance has one owner, shares are even, and the others keep theirs when one leaves."""
    instances = [f"agent-{number}/0" for number in range(300)]
    three = {instance: share_owner(instance, ["a", "b", "c"]) for instance in instances}
    two = {instance: share_owner(instance, ["c", "a"]) for instance in instances}

    assert all(two[instance] == owner for instance, owner in three.items() if owner != "b")
    assert min(list(three.values()).count(name) for name in "abc") > 70
    assert share_owner("agent/0", []) is None
