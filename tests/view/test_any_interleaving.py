"""Agents, engines, collectors, routers, Redis fail in any order: once all is quiet, each view equals the agents' own.

Real state logs, pollers, store and follower; only the wire is the test's, so that it can lose, repeat and hold answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from dualmap.core.state import LoadReport, StateUpdate
from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.state_calls import StateCallError, StateCalls
from dualmap.runtime.clock import SystemClock
from dualmap.store.connection import connect
from services.instanceagent.state_log import StateLog
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.poller import Outside, Poller, Target
from services.statecollector.settings import PollSettings
from tests.redis_process import RedisServer
from tests.view.conftest import Pool, member, ring

NAMES = ("a/0", "b/0")
COLLECTORS = (0, 1)
SETTINGS = PollSettings(interval_ms=10, timeout_ms=500, hold_ms=0, backoff_ms=1_000)
QUIET_TURNS = 6
"""One poll to find out, one to ask for everything, one to write it; and as many for a second collector in between."""


class Wire(StateCalls):
    """Answers from the logs of this process: lost, the one before once more, or held while another poll is answered."""

    def __init__(self, logs: dict[str, StateLog]) -> None:
        super().__init__()
        self.logs = logs
        self.fault = ""
        self._sent: dict[str, StateUpdate] = {}

    async def get_state(self, address: str, query: StateQuery, timeout_s: float) -> StateUpdate:
        del address, timeout_s
        fault, self.fault = self.fault, ""
        base = (query.incarnation, query.agent_epoch, query.since_version)
        answer = self.logs[query.instance_id].update(base, LoadReport(), full=query.full)
        before = self._sent.get(query.instance_id)
        self._sent[query.instance_id] = answer
        if fault == "lose":
            raise StateCallError("UNAVAILABLE", "the answer was lost")
        if fault == "repeat" and before is not None:
            return before
        if fault == "hold":
            # Whoever else polls meanwhile is faster: the held answer comes last.
            for _ in range(5):
                await asyncio.sleep(0)
        return answer


@dataclass
class World:
    """All processes of a small pool, each replaceable at any moment."""

    pool: Pool
    logs: dict[str, StateLog] = field(default_factory=dict)
    pollers: dict[tuple[str, int], Poller] = field(default_factory=dict)
    epoch: int = 0
    blocks: int = 0

    def __post_init__(self) -> None:
        for name in NAMES:
            self.logs[name] = StateLog(name, agent_epoch=1, incarnation=1, kept=16)
        self.wire = Wire(self.logs)
        for name in NAMES:
            for collector in COLLECTORS:
                self.pollers[name, collector] = self.new_poller(name)

    def new_poller(self, name: str) -> Poller:
        outside = Outside(self.wire, self.pool.states, CollectorMetrics(CollectorRegistry(), "p"), SystemClock())
        return Poller(Target(name, "wire"), SETTINGS, outside)

    async def publish(self) -> None:
        self.epoch += 1
        await self.pool.rings.publish(ring(self.epoch, *map(member, NAMES)), fencing_epoch=self.epoch)

    async def happen(self, event: str, name: str, collector: int) -> None:
        """One event; unknown ones are a defect of the test."""
        match event:
            case "store" | "many" | "remove" | "engine" | "agent":
                self.change(event, name)
            case "collector":
                self.pollers[name, collector] = self.new_poller(name)
            case "poll":
                await self.pollers[name, collector].turn()
            case "race":
                await asyncio.gather(*(self.pollers[name, number].turn() for number in COLLECTORS))
            case "router":
                self.pool.follower = self.pool.new_follower()
            case "follow":
                await self.pool.follow(1)
            case "redis":
                await self.pool.client.flushall()
                await self.publish()
            case _:
                self.wire.fault = event

    def change(self, event: str, name: str) -> None:
        """Something at the agent itself."""
        log = self.logs[name]
        match event:
            case "store":
                self.blocks += 1
                log.store([self.blocks, self.blocks + 1_000], 1)
            case "many":
                # More than the log keeps.
                self.blocks += 40
                for block in range(self.blocks - 40, self.blocks):
                    log.store([block], 2)
            case "remove":
                log.remove([self.blocks])
            case "engine":
                log.renew(log.incarnation + 1)
            case _:
                self.logs[name] = StateLog(name, log.agent_epoch + 1, log.incarnation + 1, kept=16)

    async def quiet(self) -> None:
        """Nothing fails any more; collectors and router go on."""
        self.wire.fault = ""
        for _ in range(QUIET_TURNS):
            for poller in self.pollers.values():
                await poller.turn()
            await self.pool.follow(2)
        # Loads for a fault are a second apart; the test does not wait for it.
        for progress in self.pool.follower._states._progress.values():
            progress.reload_at_ms = 0.0
        await self.pool.follow(4)


EVENTS = st.tuples(
    st.sampled_from(
        ["store"] * 4
        + ["poll"] * 6
        + ["race"] * 3
        + ["follow"] * 5
        + ["many", "remove", "engine", "agent", "collector", "router", "redis", "lose", "repeat", "hold", "hold"]
    ),
    st.sampled_from(NAMES),
    st.sampled_from(COLLECTORS),
)


@pytest.fixture
def run_history(redis_server: RedisServer) -> Callable[[list[tuple[str, str, int]]], None]:
    """Plays a history on an emptied server and checks its end."""

    async def play(history: list[tuple[str, str, int]]) -> None:
        clients: list[Redis] = [connect(redis_server.url), connect(redis_server.url)]
        world = World(Pool(*clients))
        try:
            await world.publish()
            for event in history:
                await world.happen(*event)
            await world.quiet()
            for name, log in world.logs.items():
                held = world.pool.view.instances[name]
                lives = (held.incarnation, held.agent_epoch, held.version)
                assert lives == (log.incarnation, log.agent_epoch, log.version), name
                assert held.kv.snapshot() == log.kv.snapshot()
                assert held.reachable
        finally:
            for client in clients:
                await client.aclose()

    def run(history: list[tuple[str, str, int]]) -> None:
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        asyncio.run(play(history))

    return run


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(EVENTS, max_size=60))
def test_any_interleaving_ends_with_the_agents_own_state(
    run_history: Callable[[list[tuple[str, str, int]]], None], history: list[tuple[str, str, int]]
) -> None:
    """Losses, repeats, late answers, two collectors at once, restarts of agent, engine, collector, router, Redis."""
    run_history(history)
