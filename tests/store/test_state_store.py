"""States on a real server: what is taken, what is refused, what followers can read back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.state import EMPTY_WAITING, KvSnapshot, LoadReport, QueuePolicy, StateUpdate, TicketsSeen
from dualmap.store.keys import shard_of
from dualmap.store.state_store import StateStore
from dualmap.store.state_writer import Base
from dualmap.store.streams import START, position_key

BIG = 2**63 + 11
NAME = "agent/0"


def index_of(*blocks: int) -> KvIndex:
    index = KvIndex()
    for block in blocks:
        index.set(block, 1)
    return index


def whole(version: int, *blocks: int, incarnation: int = BIG, agent_epoch: int = BIG) -> StateUpdate:
    index = index_of(*blocks)
    return StateUpdate(
        NAME,
        incarnation,
        agent_epoch,
        version,
        0,
        LoadReport(rest_s=1.0),
        index.snapshot(),
        kv_digest=index.digest,
        kv_blocks=len(index),
    )


def step(since: int, version: int, changes: bytes = b"", load: LoadReport | None = None) -> StateUpdate:
    return StateUpdate(NAME, BIG, BIG, version, since, load, None, changes, kv_digest=version, kv_blocks=1)


async def test_a_whole_state_comes_back(client: Redis) -> None:
    """Index, lives, version, digest, and every field of the load survive the way through the server."""
    store = StateStore(client, "p")
    load = LoadReport(
        waiting_s=(0.5, *EMPTY_WAITING[1:]),
        queue_policy=QueuePolicy.FIFO,
        admitting=False,
        tickets=(TicketsSeen(BIG, 7, 2**255 + 1), TicketsSeen(1, 0)),
        kv_use=0.25,
        finished=BIG,
        modelled=True,
    )
    update = replace(whole(BIG, 3, BIG), load=load)

    assert await store.write(update)
    stored = await store.snapshot(NAME)

    assert stored is not None
    assert stored.snapshot == update.snapshot
    assert stored.snapshot_version == BIG
    assert stored.head.base == Base(BIG, BIG, BIG)
    assert stored.head.load == load
    assert (stored.head.kv_digest, stored.head.kv_blocks) == (update.kv_digest, 2)
    assert stored.head.reachable
    assert 0 <= stored.head.age_ms < 10_000
    assert await store.known_instances() == {NAME}


async def test_a_change_needs_its_base(client: Redis) -> None:
    """A delta from another version, another life, or onto nothing is refused and tells what is stored."""
    store = StateStore(client, "p")
    nothing = await store.write(step(0, 1))
    await store.write(whole(5, 3))

    from_the_past = await store.write(step(4, 6))
    from_the_future = await store.write(step(6, 7))
    other_life = await store.write(replace(step(5, 6), incarnation=1))
    other_agent = await store.write(replace(step(5, 6), agent_epoch=1))
    backward = await store.write(step(5, 4))

    assert not nothing
    assert nothing.stored is None
    for refused in (from_the_past, from_the_future, other_life, other_agent, backward):
        assert not refused
        assert refused.stored == Base(BIG, BIG, 5)
    assert await store.write(step(5, 6))


@pytest.mark.parametrize(
    ("update", "taken"),
    [
        (whole(6), True),
        (whole(5), False),
        (whole(4), False),
        (whole(1, incarnation=1), True),
        (whole(1, agent_epoch=BIG + 1), True),
        (whole(1, incarnation=1, agent_epoch=BIG + 1), True),
        (whole(9, agent_epoch=BIG - 1), False),
        (whole(9, incarnation=1, agent_epoch=9), False),
    ],
)
async def test_a_whole_state_must_be_newer(client: Redis, update: StateUpdate, taken: bool) -> None:
    """Higher agent life, other cache life within it, or higher version: nothing else replaces what is stored."""
    store = StateStore(client, "p")
    await store.write(whole(5))

    assert bool(await store.write(update)) is taken


async def test_overlapping_collectors_do_no_harm(client: Redis) -> None:
    """Ten collectors write the same step at once: one is taken and one entry is appended."""
    store = StateStore(client, "p")
    await store.write(whole(5))

    outcomes = await asyncio.gather(*(store.write(step(5, 6 + number)) for number in range(10)))

    assert sum(map(bool, outcomes)) == 1
    assert len(await store.read_stream({shard_of(NAME): START}, block_ms=0)) == 2


async def test_a_follower_reads_each_step(client: Redis) -> None:
    """Entries carry both versions, lives, load, changes and digest; a whole state says only that there is a new one."""
    store = StateStore(client, "p")
    shard = shard_of(NAME)
    await store.write(whole(5, 3))
    changes = pack_change(BIG, 2)
    await store.write(step(5, 7, changes, LoadReport(rest_s=2.0)))

    first, second = await store.read_stream({shard: START}, block_ms=0)

    assert first.change is not None
    assert (first.instance_id, first.change.full, first.change.changes) == (NAME, True, b"")
    assert second.change is not None
    assert (second.change.since, second.change.version, second.change.changes) == (5, 7, changes)
    assert (second.change.incarnation, second.change.agent_epoch) == (BIG, BIG)
    assert second.change.load == LoadReport(rest_s=2.0)
    assert second.change.kv_digest == 7
    assert (await store.positions())[shard] == second.position
    assert await store.read_stream({shard: second.position}, block_ms=5) == []


async def test_an_absent_load_leaves_the_stored_one(client: Redis) -> None:
    """A poll that reports no load does not wipe the last one."""
    store = StateStore(client, "p")
    await store.write(whole(5))
    await store.write(step(5, 6))

    stored = await store.snapshot(NAME)

    assert stored is not None
    assert stored.head.load.rest_s == 1.0


async def test_reachability_is_said_once_and_only_by_who_is_up_to_date(client: Redis) -> None:
    """A mark with an old base is refused, a repeated one appends nothing, and any later poll result takes it back."""
    store = StateStore(client, "p")
    shard = shard_of(NAME)
    await store.write(whole(5))
    base = Base(BIG, BIG, 5)

    assert not await store.mark_unreachable(NAME, Base(BIG, BIG, 4))
    assert await store.mark_unreachable(NAME, base)
    assert not await store.mark_unreachable(NAME, base)
    assert not (await store.heads([NAME]))[NAME].reachable
    assert await store.mark_reachable(NAME, base)
    assert await store.mark_unreachable(NAME, base)
    assert await store.write(step(5, 5))
    assert (await store.heads([NAME]))[NAME].reachable

    entries = await store.read_stream({shard: START}, block_ms=0)
    assert [entry.reachable for entry in entries] == [True, False, True, False, True]


async def test_the_stream_is_bounded_and_tells_when_to_pack_anew(client: Redis) -> None:
    """Under churn the packed index falls behind and is due before the trim reaches it; rewriting resets that."""
    store = StateStore(client, "p", max_entries=10)
    shard = shard_of(NAME)
    await store.write(whole(0))
    behind = 0
    for version in range(1, 6):
        behind = (await store.write(step(version - 1, version, pack_change(version, 1)))).behind
    assert behind == 5
    assert store.rewrite_due(behind)

    assert await store.rewrite(whole(6, 1, 2, 3))
    stored = await store.snapshot(NAME)
    assert stored is not None
    assert (stored.snapshot_version, stored.head.base.version) == (6, 5)
    assert stored.snapshot == index_of(1, 2, 3).snapshot()
    assert (await store.write(step(5, 7, pack_change(7, 1)))).behind == 1
    for version in range(8, 30):
        await store.write(step(version - 1, version))
    assert len(await store.read_stream({shard: START}, block_ms=0)) == 10


async def test_a_larger_pool_has_longer_streams(client: Redis) -> None:
    """A packed index is not rewritten oftener for having more neighbours; a pool that shrinks is trimmed again."""
    store = StateStore(client, "p", max_entries=10)
    shard = shard_of(NAME)
    await store.write(whole(0))
    store.expect(1)
    for version in range(1, 40):
        await store.write(step(version - 1, version))

    assert len(await store.read_stream({shard: START}, block_ms=0)) == 32
    assert not store.rewrite_due(15)
    store.expect(0)
    await store.write(step(39, 40))
    assert len(await store.read_stream({shard: START}, block_ms=0)) == 10


async def test_an_idle_index_is_never_rewritten(client: Redis) -> None:
    """While no block changes, only the position of the packed index moves on."""
    store = StateStore(client, "p", max_entries=10)
    await store.write(whole(0, 3))

    outcomes = [await store.write(step(version, version + 1)) for version in range(30)]

    assert {outcome.behind for outcome in outcomes} == {0}
    stored = await store.snapshot(NAME)
    assert stored is not None
    assert stored.snapshot_version == 30
    assert stored.position == (await store.positions())[shard_of(NAME)]


async def test_a_rewrite_of_another_life_or_the_past_is_refused(client: Redis) -> None:
    """A packed index is replaced only by one of the same lives that is not older than the stored version."""
    store = StateStore(client, "p")
    assert not await store.rewrite(whole(5))
    await store.write(whole(5))

    assert not await store.rewrite(whole(4))
    assert not await store.rewrite(whole(6, incarnation=1))
    assert not await store.rewrite(whole(6, agent_epoch=1))
    assert await store.rewrite(whole(5))


async def test_an_instance_that_left_is_forgotten(client: Redis) -> None:
    """Removal leaves neither state nor membership of the set."""
    store = StateStore(client, "p")
    await store.write(whole(5))

    await store.remove(NAME)

    assert await store.snapshot(NAME) is None
    assert await store.known_instances() == set()
    assert await store.write(whole(1))


async def test_an_entry_of_an_unknown_format_does_not_hide_the_rest(client: Redis) -> None:
    """What a later release wrote is told as unreadable, and the entries behind it are still read."""
    store = StateStore(client, "p")
    await client.xadd(store.keys.stream(shard_of(NAME)), {"i": NAME, "e": b"\x81\xa1f\x63"})
    await store.write(whole(1))

    broken, good = await store.read_stream({shard_of(NAME): START}, block_ms=0)

    assert broken.unreadable
    assert broken.change is None
    assert good.change is not None
    assert position_key(broken.position) < position_key(good.position)


async def test_empty_snapshot_is_a_whole_index(client: Redis) -> None:
    """An instance that holds nothing is stored whole like any other."""
    store = StateStore(client, "p")
    await store.write(replace(whole(1), snapshot=KvSnapshot()))

    stored = await store.snapshot(NAME)

    assert stored is not None
    assert stored.snapshot == KvSnapshot()
