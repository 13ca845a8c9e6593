"""Several collectors of one pool: each instance has one, and a lost collector's share is taken over."""

from __future__ import annotations

import asyncio
import time

from dualmap.core.state import LoadReport
from dualmap.store.streams import START
from services.statecollector.app import App
from services.statecollector.poller import Poller, Target
from services.statecollector.settings import ShareSettings
from tests.services.statecollector.conftest import FAST_POLL, Cluster, collector_process
from tests.services.statecollector.fake_agent import FakeRank
from tests.waiting import until

RANKS = 32
"""So many that none of three collectors goes without but once in 100,000 runs."""


def shared_out(*apps: App) -> bool:
    """Every instance is polled by exactly one of them, and each has some."""
    shares = [set(app.roster.polled) for app in apps]
    return all(shares) and sum(map(len, shares)) == RANKS == len(set.union(*shares))


async def ranks_of(cluster: Cluster) -> list[FakeRank]:
    # Idle, for held polls leave the machine to the collectors.
    ranks = [FakeRank(f"a/{number}", load=LoadReport()) for number in range(RANKS)]
    await cluster.agent(*ranks)
    await cluster.publish()
    return ranks


async def test_collectors_divide_the_pool(cluster: Cluster) -> None:
    """One, two, then three collectors: at each step every instance has exactly one."""
    await ranks_of(cluster)
    one = await cluster.collector()
    await until(lambda: shared_out(one))
    two = await cluster.collector()
    await until(lambda: shared_out(one, two))
    three = await cluster.collector()
    await until(lambda: shared_out(one, two, three))

    # A beat that comes late on a busy machine gives a share away for a moment.
    await until(lambda: len({one.roster.owner_of(f"a/{number}") for number in range(RANKS)}) == 3)


async def test_a_collector_that_leaves_hands_over_at_once(cluster: Cluster) -> None:
    """A stopped collector gives its share up without waiting for its registration to end."""
    ranks = await ranks_of(cluster)
    one = await cluster.collector()
    async with App(cluster.settings()) as two:
        await until(lambda: shared_out(one, two))

    await until(lambda: shared_out(one))
    for rank in ranks:
        rank.store(5)
    for rank in ranks:
        await cluster.until_stored(rank)


async def test_a_killed_collector_is_replaced_within_two_seconds(cluster: Cluster) -> None:
    """With the default times a collector killed without a word loses its share within 2 s."""
    ranks = await ranks_of(cluster)
    default = cluster.settings().model_copy(update={"share": ShareSettings()})
    async with App(default) as one, collector_process(cluster.url) as (process, _):
        await until(lambda: 0 < len(one.roster.polled) < RANKS, timeout_s=20)
        process.kill()
        before_s = time.monotonic()
        await until(lambda: shared_out(one))
        took_s = time.monotonic() - before_s
        for rank in ranks:
            rank.store(5)
        for rank in ranks:
            await cluster.until_stored(rank)

    assert took_s < 2.0


async def test_overlapping_collectors_write_each_step_once(cluster: Cluster) -> None:
    """Two collectors that both think an instance theirs leave one unbroken chain of steps."""
    (rank, *_) = await ranks_of(cluster)
    one, two = await cluster.collector(), await cluster.collector()
    await until(lambda: shared_out(one, two))
    away = one if rank.name not in one.roster.polled else two
    stop = asyncio.Event()
    stranger = Poller(Target(rank.name, cluster.agents[0].address), FAST_POLL, away.roster._outside)
    task = asyncio.create_task(stranger.run(stop))

    for block in range(1, 40):
        rank.store(block)
        await cluster.until_stored(rank)
    stop.set()
    await task

    shard_positions = dict.fromkeys(range(8), START)
    changes = [
        entry.change
        for entry in await cluster.states.read_stream(shard_positions, block_ms=0)
        if entry.change is not None and entry.instance_id == rank.name
    ]
    version = 0
    for change in changes:
        assert change.full or change.since == version
        assert change.version >= version
        version = change.version
    assert version == rank.version
