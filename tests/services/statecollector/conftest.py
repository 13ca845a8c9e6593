"""Collectors as their App builds them, on a real server, polling hand-written agents."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest_asyncio
from redis.asyncio import Redis

from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.runtime.settings import MetricsSettings, PoolSettings, RedisSettings, ServerSettings
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateHead, StateStore
from services.statecollector.app import App
from services.statecollector.settings import PollSettings, Settings, ShareSettings
from tests.services.statecollector.fake_agent import FakeAgent, FakeRank
from tests.waiting import until

FAST_POLL = PollSettings(interval_ms=20, timeout_ms=150, hold_ms=200, backoff_ms=100)
FAST_SHARE = ShareSettings(beat_ms=30, ttl_ms=120)


class Cluster:
    """One pool: its ring, its agents, its collectors."""

    def __init__(self, url: str, client: Redis, stack: AsyncExitStack) -> None:
        self.url = url
        self.client = client
        self.rings = RingStore(client, "p")
        self.states = StateStore(client, "p")
        self.epoch = 0
        self.agents: list[FakeAgent] = []
        self._stack = stack

    def settings(self, poll: PollSettings = FAST_POLL) -> Settings:
        return Settings(
            redis=RedisSettings(url=self.url),
            pool=PoolSettings(name="p"),
            server=ServerSettings(port=0, drain_grace_s=0.2),
            metrics=MetricsSettings(port=None),
            poll=poll,
            share=FAST_SHARE,
        )

    async def agent(self, *ranks: FakeRank) -> FakeAgent:
        agent = FakeAgent(*ranks)
        await agent.start()
        self._stack.push_async_callback(agent.stop)
        self.agents.append(agent)
        return agent

    async def publish(self, *left: str) -> None:
        """A ring of all agents' ranks but those that left."""
        self.epoch += 1
        members = tuple(
            Member(name, agent.address, state=InstanceState.WARMING, agent_epoch=rank.agent_epoch)
            for agent in self.agents
            for name, rank in agent.ranks.items()
            if name not in left
        )
        await self.rings.publish(RingSnapshot("p", self.epoch, RingParameters(), members), fencing_epoch=1)

    async def collector(self, poll: PollSettings = FAST_POLL) -> App:
        return await self._stack.enter_async_context(App(self.settings(poll)))

    async def head(self, name: str) -> StateHead | None:
        return (await self.states.heads([name])).get(name)

    async def until_stored(self, rank: FakeRank) -> None:
        """Redis holds what the rank is."""

        async def stored() -> bool:
            head = await self.head(rank.name)
            return (
                head is not None
                and head.reachable
                and (head.base.incarnation, head.base.agent_epoch) == (rank.incarnation, rank.agent_epoch)
                and head.base.version == rank.version
                and head.kv_digest == rank.index.digest
            )

        await until(stored)

    async def until_reachable(self, name: str, reachable: bool) -> None:
        async def said() -> bool:
            head = await self.head(name)
            return head is not None and head.reachable is reachable

        await until(said)


@asynccontextmanager
async def collector_process(url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, object]]]:
    """A collector as a process of its own, and the line it said when it served; killed at the end if still there."""
    environment = {
        **os.environ,
        "DUALMAP_REDIS__URL": url,
        "DUALMAP_POOL__NAME": "p",
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.statecollector",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = json.loads(await process.stdout.readline())
        yield process, line
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.communicate()


@pytest_asyncio.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    """An empty pool."""
    async with AsyncExitStack() as stack:
        client = connect(redis_url)
        stack.push_async_callback(client.aclose)
        yield Cluster(redis_url, client, stack)
