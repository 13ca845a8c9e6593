"""A view that follows a real server: what it holds equals what was written, whatever was lost on the way."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from dualmap.core.membership import InstanceState, PreviousRing, Split
from dualmap.core.state import EMPTY_WAITING, LoadReport, TicketsSeen
from dualmap.store.connection import RedisOptions, StoreError, connect
from dualmap.store.keys import shard_of
from dualmap.store.state_writer import Base
from dualmap.view.events import ViewEvent
from dualmap.view.follower import Follower
from dualmap.view.ring_file import RingFile
from tests.redis_process import RedisServer
from tests.view.conftest import ROUTER, FakeInstance, Pool, member, ring
from tests.waiting import until


async def started(pool: Pool, *names: str) -> list[FakeInstance]:
    """A pool of ACTIVE instances with some blocks each, followed."""
    instances = [FakeInstance(name) for name in names]
    await pool.rings.publish(ring(1, *map(member, names)), fencing_epoch=1)
    for instance in instances:
        instance.step(10, 20, 30)
        await pool.states.write(instance.whole())
    await pool.follow()
    return instances


def is_degraded(pool: Pool) -> bool:
    return pool.view.degraded


async def test_a_view_starts_from_snapshots_and_follows(pool: Pool) -> None:
    """Ring, indexes and loads are there after the start, and each further step arrives without a reload."""
    one, two = await started(pool, "a/0", "b/0")
    assert pool.view.ready
    assert not pool.view.degraded

    await pool.states.write(one.step(40, load=LoadReport(rest_s=3.0)))
    await pool.states.write(two.step(50))
    await pool.follow()

    pool.assert_holds(one)
    pool.assert_holds(two)
    assert pool.view.instances["a/0"].load.rest_s == 3.0
    assert pool.view.instances["a/0"].member == member("a/0")
    assert not pool.view.counts


async def test_a_late_follower_replays_what_the_packed_index_lacks(pool: Pool) -> None:
    """A new view takes the packed index and the stream behind it to the same state as one that was there all along."""
    instances = await started(pool, "a/0", "b/0", "c/0")
    for round_number in range(8):
        for instance in instances:
            await pool.states.write(instance.step(100 + round_number, load=LoadReport(rest_s=float(round_number))))

    pool.follower = pool.new_follower()
    await pool.follow()

    for instance in instances:
        pool.assert_holds(instance)
        assert pool.view.instances[instance.name].load.rest_s == 7.0
    assert not pool.view.counts


async def test_a_rewritten_snapshot_ahead_of_the_stream_is_harmless(pool: Pool) -> None:
    """An index packed at a version that the stream has not told yet leads on to the same state."""
    (one,) = await started(pool, "a/0")
    base = one.version
    one.step(40)
    await pool.states.rewrite(one.whole())

    pool.follower = pool.new_follower()
    await pool.follow()
    held_ahead = pool.view.instances["a/0"].version
    last = one.step(50)
    overlap = replace(last, since=base, changes=b"".join(map(bytes, ([40, *[0] * 7, 1], [50, *[0] * 7, 1]))))
    assert await pool.states.write(overlap)
    await pool.follow()

    assert held_ahead == base + 1
    pool.assert_holds(one)
    assert not pool.view.counts


async def test_a_missing_step_reloads_that_instance_only(pool: Pool) -> None:
    """An entry that never arrived is noticed at the next one; the instance is loaded whole, the others are not."""
    one, two = await started(pool, "a/0", "b/0")
    await pool.states.write(one.step(40))
    await pool.client.xtrim(pool.states.keys.stream(shard_of("a/0")), maxlen=0)
    await pool.states.write(one.step(50))
    await pool.states.rewrite(one.whole())
    await pool.states.write(two.step(60))

    await pool.follow(6)

    pool.assert_holds(one)
    pool.assert_holds(two)
    assert pool.view.counts == {ViewEvent.GAP: 1}


async def test_a_wrong_digest_reloads(pool: Pool) -> None:
    """An index that differs from the agent's at the same version is loaded anew and counted."""
    (one,) = await started(pool, "a/0")
    with pool.view.lock:
        pool.view.instances["a/0"].kv.discard(20)

    await pool.states.write(one.step(40))
    await pool.follow(6)

    pool.assert_holds(one)
    assert pool.view.counts == {ViewEvent.DIGEST: 1}


async def test_a_restarted_engine_or_agent_drops_the_old_index(pool: Pool) -> None:
    """A new life is loaded whole; it is no fault and no phantom block survives."""
    await started(pool, "a/0")
    reborn = FakeInstance("a/0", agent_epoch=2)
    reborn.step(99)

    await pool.states.write(reborn.whole())
    await pool.follow(6)

    pool.assert_holds(reborn)
    assert pool.view.instances["a/0"].agent_epoch == 2
    assert not pool.view.counts
    reborn.incarnation = 7
    reborn.index.discard(99)
    await pool.states.write(reborn.whole())
    await pool.follow(6)
    pool.assert_holds(reborn)


async def test_bookings_are_covered_by_what_the_agent_saw(pool: Pool) -> None:
    """A report that shows a ticket removes its booking; the others expire although nothing more is heard."""
    (one,) = await started(pool, "a/0")
    bookings = pool.view.instances["a/0"].bookings
    now_ms = pool.view.clock_ms()
    for sequence, booked_ms in enumerate((now_ms - 60_000, now_ms, now_ms, now_ms), start=1):
        bookings.add(sequence, 1.0, 1, 1, (), 10, booked_ms)

    tickets = (TicketsSeen(ROUTER, 0, 0b1010), TicketsSeen(ROUTER - 1, 9))
    await pool.states.write(one.step(load=LoadReport(tickets=tickets)))
    await pool.follow()

    assert pool.view.instances["a/0"].bookings is bookings
    assert len(bookings) == 1
    assert bookings.release(3)


async def test_an_unreachable_instance_is_skipped_and_returns(pool: Pool) -> None:
    """What a collector says of reachability arrives at once, both ways; so does a poll result after it."""
    one, _, _ = await started(pool, "a/0", "b/0", "c/0")
    base = Base(one.incarnation, one.agent_epoch, one.version)

    await pool.states.mark_unreachable("a/0", base)
    await pool.follow(1)
    assert not pool.view.instances["a/0"].reachable
    assert not pool.view.instances["a/0"].eligible
    assert pool.view.instances["b/0"].reachable

    late = pool.new_follower()
    for _ in range(4):
        await late.step()
    assert not late.view.instances["a/0"].reachable

    await pool.states.write(one.beat())
    await pool.follow(2)
    assert pool.view.instances["a/0"].eligible


async def test_most_of_a_pool_gone_at_once_is_unknown_not_dead(pool: Pool) -> None:
    """When the collector is blind, all stay eligible, counted once; when half is back, the rest is dead again."""
    instances = await started(pool, "a/0", "b/0", "c/0", "d/0")
    for instance in instances[:3]:
        await pool.states.mark_unreachable(
            instance.name, Base(instance.incarnation, instance.agent_epoch, instance.version)
        )
    await pool.follow()

    assert all(view.eligible for view in pool.view.instances.values())
    assert pool.view.counts == {ViewEvent.MASS_UNREACHABLE: 1}

    await pool.states.write(instances[0].beat())
    await pool.follow()
    assert [view.eligible for _, view in sorted(pool.view.instances.items())] == [True, False, False, True]


async def test_members_come_and_go_with_the_ring(pool: Pool) -> None:
    """A new member is loaded, one that left is gone with all that was known of it, a warming one is not on the ring."""
    await started(pool, "a/0", "b/0")
    three = FakeInstance("c/0")
    three.step(5)
    await pool.states.write(three.whole())

    members = (member("b/0", InstanceState.DRAINING), member("c/0"), member("d/0", InstanceState.WARMING))
    await pool.rings.publish(ring(2, *members), fencing_epoch=1)
    await pool.follow()

    assert sorted(pool.view.instances) == ["b/0", "c/0", "d/0"]
    assert not pool.view.instances["b/0"].eligible
    pool.assert_holds(three)
    assert pool.view.picture is not None
    assert pool.view.picture.epoch == 2
    assert pool.view.picture.ring.instance_ids == ("b/0", "c/0")


async def test_the_previous_ring_is_readable_for_the_grace_period_only(pool: Pool) -> None:
    """The old mapping is in the picture after a change and gone when its time is over, with no further epoch."""
    previous = PreviousRing(1, (member("a/0"),), (Split(7, 1, 2),), 60)
    await pool.rings.publish(ring(2, member("a/0"), member("b/0"), previous=previous), fencing_epoch=1)
    await pool.follow(1)
    picture = pool.view.picture
    assert picture is not None
    assert picture.previous is not None
    assert picture.previous[0].instance_ids == ("a/0",)

    async def over() -> bool:
        await pool.follower.step()
        return pool.view.picture is not None and pool.view.picture.previous is None

    await until(over)


async def test_a_store_that_lost_its_data_does_not_take_the_view_with_it(pool: Pool) -> None:
    """After the server was emptied the view keeps ring and indexes, degraded, until a higher epoch is published."""
    (one,) = await started(pool, "a/0")
    await pool.rings.publish(ring(5, member("a/0")), fencing_epoch=1)
    await pool.follow(2)

    await pool.client.flushall()
    await pool.follow(3)
    assert is_degraded(pool)
    assert pool.view.ring == ring(5, member("a/0"))
    pool.assert_holds(one)
    await pool.rings.publish(ring(3, member("x/0")), fencing_epoch=2)
    await pool.follow(3)
    assert is_degraded(pool)
    assert sorted(pool.view.instances) == ["a/0"]
    assert pool.view.counts == {ViewEvent.EPOCH_BACKWARD: 1}

    one.step(70)
    await pool.states.write(one.whole())
    await pool.rings.publish(ring(6, member("a/0")), fencing_epoch=2)
    await pool.follow(5)
    assert not is_degraded(pool)
    pool.assert_holds(one)


async def test_a_big_change_is_applied_in_chunks_to_the_same_index(pool: Pool) -> None:
    """Thousands of blocks in one step end in the agent's digest."""
    (one,) = await started(pool, "a/0")
    blocks = [number * 7_919 for number in range(1, 5_000)]

    await pool.states.write(one.step(*blocks))
    await pool.follow()

    pool.assert_holds(one)
    assert not pool.view.counts


async def test_what_cannot_be_read_is_passed_over_and_counted(pool: Pool) -> None:
    """An entry in an unknown format reloads its instance and hides nothing behind it."""
    one, two = await started(pool, "a/0", "b/0")
    await pool.client.xadd(pool.states.keys.stream(shard_of("a/0")), {"i": "a/0", "e": b"\x81\xa1f\x63"})
    await pool.states.write(one.step(40))
    await pool.states.write(two.step(40))

    await pool.follow(6)

    pool.assert_holds(one)
    pool.assert_holds(two)
    assert pool.view.counts == {ViewEvent.UNREADABLE: 1}


async def test_a_view_outlives_the_server_and_comes_back(pool: Pool, redis_server: RedisServer) -> None:
    """While the server does not answer the view serves, degraded; when it answers again, it catches up."""
    (one,) = await started(pool, "a/0")
    blocked = connect(RedisOptions(redis_server.url, socket_timeout_s=0.3, connect_timeout_s=0.1))
    pool.follower = pool.new_follower(client=blocked)
    stop = asyncio.Event()
    running = asyncio.create_task(pool.follower.run(stop))
    # Not degraded is it already with the ring alone.
    await until(lambda: pool.view.ready and pool.view.instances["a/0"].version == one.version)

    redis_server.process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: pool.view.degraded, timeout_s=10)
    finally:
        redis_server.process.send_signal(signal.SIGCONT)
    assert pool.view.ready
    pool.assert_holds(one)
    await until(lambda: not pool.view.degraded, timeout_s=20)
    await pool.states.write(one.step(40))
    await until(lambda: pool.view.instances["a/0"].version == one.version)

    stop.set()
    async with asyncio.timeout(2):
        await running
    assert pool.view.counts[ViewEvent.STORE_LOST] == pool.view.counts[ViewEvent.STORE_BACK] >= 1
    await blocked.aclose()


class _LosesItsCancellation(Follower):
    """Its store answers a cancellation with an error, as the client does where it is just connecting."""

    async def step(self) -> NoReturn:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StoreError("no connection") from None
        raise AssertionError("nobody sets it")


async def test_a_cancelled_follower_ends_also_where_the_client_makes_an_error_of_it(pool: Pool) -> None:
    """It would follow for ever otherwise, and hold up whoever waits for its end."""
    follower = _LosesItsCancellation(pool.view, pool.client, "p")
    running = asyncio.create_task(follower.run(asyncio.Event()))
    await asyncio.sleep(0)

    running.cancel()

    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()


async def test_a_router_starts_from_its_ring_file(pool: Pool, tmp_path: Path) -> None:
    """The ring is saved at each epoch; a view whose server is away starts from it, degraded, with the same pairs."""
    file = RingFile(tmp_path / "folder" / "ring")
    pool.follower = pool.new_follower(file)
    await started(pool, "a/0", "b/0")
    await pool.rings.publish(ring(2, member("a/0"), member("b/0"), splits=(Split(7, 1, 2),)), fencing_epoch=1)
    await pool.follow()
    saved = pool.view.ring

    away = connect("unix:///nowhere/r.sock")
    pool.follower = pool.new_follower(file, away)
    stop = asyncio.Event()
    running = asyncio.create_task(pool.follower.run(stop))
    await until(lambda: pool.view.ready)

    assert pool.view.degraded
    assert pool.view.ring == saved
    assert pool.view.instances["a/0"].eligible
    assert pool.view.counts[ViewEvent.STARTED_FROM_FILE] == 1
    stop.set()
    await running
    await away.aclose()


@pytest.mark.parametrize("content", [b"", b"\x00half", b"\x81\xa1f\x63"])
async def test_a_damaged_ring_file_is_counted_not_followed(pool: Pool, tmp_path: Path, content: bytes) -> None:
    """Half a file or a later format leaves the view without a ring, and says so once."""
    (tmp_path / "ring").write_bytes(content)
    away = connect("unix:///nowhere/r.sock")
    pool.follower = pool.new_follower(RingFile(tmp_path / "ring"), away)
    stop = asyncio.Event()
    running = asyncio.create_task(pool.follower.run(stop))

    await until(lambda: pool.view.counts[ViewEvent.RING_FILE_BROKEN] == 1)
    stop.set()
    await running

    assert not pool.view.ready
    await away.aclose()


async def test_the_load_is_never_replaced_by_an_older_one(pool: Pool) -> None:
    """Replaying what the packed index lacks does not bring back the loads of then."""
    (one,) = await started(pool, "a/0")
    seen = []
    for number in range(3):
        waiting = (float(number + 1), *EMPTY_WAITING[1:])
        await pool.states.write(one.step(100 + number, load=LoadReport(waiting_s=waiting)))
    pool.follower = pool.new_follower()
    await pool.follower.step()
    seen.append(pool.view.instances["a/0"].load.waiting_s[0])
    await pool.follow()
    seen.append(pool.view.instances["a/0"].load.waiting_s[0])

    assert seen == [3.0, 3.0]
    pool.assert_holds(one)


def test_lost_connections_are_what_the_client_calls_them() -> None:
    """Every error of the client that means "no answer" counts as the store being lost."""
    assert issubclass(redis.ConnectionError, redis.RedisError)
    assert issubclass(redis.TimeoutError, redis.RedisError)
