"""Whatever happens in whatever order, a follower ends with what was written: seeded histories on a real server."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.store.state_writer import Base
from tests.view.conftest import FakeInstance, Pool, member, ring

NAMES = ("a/0", "b/0", "c/0", "d/0", "e/0")


class History:
    """One random history of a pool, written as a collector would write it."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.dice = random.Random(seed)
        self.instances = {name: FakeInstance(name) for name in NAMES}

    async def begin(self) -> None:
        await self.pool.rings.publish(ring(1, *map(member, NAMES)), fencing_epoch=1)
        for instance in self.instances.values():
            await self.pool.states.write(instance.whole())

    async def happen(self) -> None:
        """One event, followed by a few steps of the follower or none."""
        instance = self.dice.choice(list(self.instances.values()))
        event = self.dice.choice((self.churn, self.churn, self.churn, self.idle, self.overlap, self.restart, self.mark))
        await event(instance)
        if self.dice.random() < 0.3:
            await self.pool.follow(1)
        if self.dice.random() < 0.02:
            self.pool.follower = self.pool.new_follower()

    async def churn(self, instance: FakeInstance) -> None:
        changes = b"".join(
            pack_change(self.dice.randrange(1, 60), self.dice.randrange(4)) for _ in range(self.dice.randrange(1, 6))
        )
        instance.index.apply(changes)
        instance.version += 1
        outcome = await self.pool.states.write(replace(instance.beat(), since=instance.version - 1, changes=changes))
        assert outcome
        if self.pool.states.rewrite_due(outcome.behind):
            assert await self.pool.states.rewrite(instance.whole())

    async def idle(self, instance: FakeInstance) -> None:
        assert await self.pool.states.write(instance.beat())

    async def overlap(self, instance: FakeInstance) -> None:
        """The index is packed ahead of the version told, as when a collector takes an instance over."""
        base = instance.version
        change = pack_change(self.dice.randrange(1, 60), 1)
        instance.index.apply(change)
        instance.version += 1
        assert await self.pool.states.rewrite(instance.whole())
        assert await self.pool.states.write(replace(instance.beat(), since=base, changes=change))

    async def restart(self, instance: FakeInstance) -> None:
        if self.dice.random() < 0.5:
            instance.incarnation += 1
        else:
            instance.agent_epoch += 1
        instance.index = KvIndex()
        instance.version = self.dice.randrange(1, 5)
        assert await self.pool.states.write(instance.whole())

    async def mark(self, instance: FakeInstance) -> None:
        base = Base(instance.incarnation, instance.agent_epoch, instance.version)
        await self.pool.states.mark_unreachable(instance.name, base)
        if self.dice.random() < 0.8:
            await self.pool.states.mark_reachable(instance.name, base)


@pytest.mark.parametrize("seed", range(8))
async def test_a_follower_ends_with_what_was_written(pool: Pool, seed: int) -> None:
    """Churn, restarts, overlapping and repacked indexes, marks, trims and late followers: index and version agree."""
    history = History(pool, seed)
    await history.begin()
    for _ in range(400):
        await history.happen()
    for instance in history.instances.values():
        outcome = await pool.states.write(instance.beat())
        if pool.states.rewrite_due(outcome.behind):
            await pool.states.rewrite(instance.whole())

    for progress in pool.follower._states._progress.values():
        progress.reload_at_ms = 0.0
    await pool.follow(20)

    for instance in history.instances.values():
        pool.assert_holds(instance)
        assert pool.view.instances[instance.name].reachable
