"""A pool on a real server, written to as a ring manager and a collector would, and a view that follows it."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

import pytest_asyncio
from redis.asyncio import Redis

from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.core.state import LoadReport, StateUpdate
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from dualmap.view.cluster_view import ClusterView, ViewOptions
from dualmap.view.follower import Follower, FollowerOptions
from dualmap.view.ring_file import RingFile

ROUTER = 2**64 - 3
STEPPED = FollowerOptions(block_ms=0, tick_ms=0, epoch_check_ms=0)
RUNNING = FollowerOptions(block_ms=20, tick_ms=0, epoch_check_ms=0, backoff_max_s=0.05)


def member(name: str, state: InstanceState = InstanceState.ACTIVE) -> Member:
    return Member(name, "127.0.0.1:1", state=state, model="m")


def ring(
    epoch: int, *members: Member, previous: PreviousRing | None = None, splits: tuple[Split, ...] = ()
) -> RingSnapshot:
    return RingSnapshot("p", epoch, RingParameters(), members, splits, previous=previous)


class FakeInstance:
    """What an agent would report: an index, and each change of it as an update."""

    def __init__(self, name: str, agent_epoch: int = 1) -> None:
        self.name = name
        self.index = KvIndex()
        self.incarnation = 1
        self.agent_epoch = agent_epoch
        self.version = 1

    def whole(self, load: LoadReport | None = None) -> StateUpdate:
        return self._update(0, load, b"", full=True)

    def step(self, *blocks: int, load: LoadReport | None = None) -> StateUpdate:
        """The blocks are stored; the version goes up by one."""
        changes = b"".join(pack_change(block, 1) for block in blocks)
        self.index.apply(changes)
        self.version += 1
        return self._update(self.version - 1, load, changes)

    def beat(self) -> StateUpdate:
        """Nothing changed."""
        return self._update(self.version, None, b"")

    def _update(self, since: int, load: LoadReport | None, changes: bytes, *, full: bool = False) -> StateUpdate:
        return StateUpdate(
            self.name,
            self.incarnation,
            self.agent_epoch,
            self.version,
            since,
            load or LoadReport(),
            self.index.snapshot() if full else None,
            changes,
            self.index.digest,
            len(self.index),
        )


class Pool:
    """The writers' side and one follower, driven step by step."""

    def __init__(self, client: Redis, follower_client: Redis) -> None:
        self.client = client
        self.follower_client = follower_client
        self.rings = RingStore(client, "p")
        self.states = StateStore(client, "p", max_entries=64)
        self.follower = self.new_follower()

    @property
    def view(self) -> ClusterView:
        return self.follower.view

    def new_follower(self, ring_file: RingFile | None = None, client: Redis | None = None) -> Follower:
        view = ClusterView(
            "p",
            threading.Lock(),
            lambda: time.monotonic() * 1_000,
            ViewOptions(router_id=ROUTER),
            lambda event, about: None,
        )
        if client is not None:
            return Follower(view, client, "p", RUNNING, ring_file)
        return Follower(view, self.follower_client, "p", STEPPED, ring_file)

    async def follow(self, steps: int = 4) -> None:
        """Enough steps to take in all that was written."""
        for _ in range(steps):
            await self.follower.step()

    def assert_holds(self, instance: FakeInstance) -> None:
        held = self.view.instances[instance.name]
        assert held.version == instance.version
        assert held.kv.digest == instance.index.digest
        assert held.kv.snapshot() == instance.index.snapshot()


@pytest_asyncio.fixture
async def pool(redis_url: str) -> AsyncIterator[Pool]:
    """An empty pool and a follower of it."""
    client, follower_client = connect(redis_url), connect(redis_url)
    yield Pool(client, follower_client)
    await client.aclose()
    await follower_client.aclose()
