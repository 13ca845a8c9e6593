"""One poller, turned by hand: what it does when the store says no or says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.state_calls import StateCalls
from dualmap.runtime.clock import SystemClock
from dualmap.store.connection import RedisOptions, connect
from dualmap.store.state_store import StateStore
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.poller import Outside, Poller, Target
from services.statecollector.settings import PollSettings
from tests.services.statecollector.fake_agent import FakeAgent, FakeRank

SETTINGS = PollSettings(interval_ms=10, timeout_ms=500, hold_ms=0, backoff_ms=1_000)
BACKOFF_S = 1.0


class Rig:
    """A poller, its agent and its store."""

    def __init__(self, client: Redis, calls: StateCalls, rank: FakeRank, agent: FakeAgent) -> None:
        self.client = client
        self.calls = calls
        self.rank = rank
        self.agent = agent
        self.registry = CollectorRegistry()
        self.store = StateStore(client, "p")
        self.poller = self.new_poller(self.store)

    def new_poller(self, store: StateStore) -> Poller:
        registry = self.registry = CollectorRegistry()
        outside = Outside(self.calls, store, CollectorMetrics(registry, "p"), SystemClock())
        return Poller(Target(self.rank.name, self.agent.address), SETTINGS, outside)

    def writes(self, reason: str) -> float:
        sample = {"pool": "p", "reason": reason}
        return self.registry.get_sample_value("dualmap_collector_writes_total", sample) or 0.0

    async def version(self) -> int:
        heads = await self.store.heads([self.rank.name])
        return heads[self.rank.name].base.version if heads else 0


@pytest_asyncio.fixture
async def rig(redis_url: str) -> AsyncIterator[Rig]:
    """Nothing polled yet."""
    client = connect(redis_url)
    rank = FakeRank("a/0")
    rank.store(1, 2, 3)
    agent = FakeAgent(rank)
    await agent.start()
    async with StateCalls() as calls:
        yield Rig(client, calls, rank, agent)
    await agent.stop()
    await client.aclose()


async def test_a_new_collector_takes_over_without_a_reload(rig: Rig) -> None:
    """A second collector packs the index anew and goes on with the next step: no FULL entry for followers to load."""
    await rig.poller.turn()
    rig.rank.store(4)
    successor = rig.new_poller(rig.store)
    await successor.turn()
    await successor.turn()

    positions = dict.fromkeys(range(8), "0-0")
    entries = await rig.store.read_stream(positions, block_ms=0)
    stored = await rig.store.snapshot("a/0")

    assert [entry.change.full for entry in entries if entry.change is not None] == [True, False]
    assert rig.writes("rewritten") == 1
    assert stored is not None
    assert stored.head.base.version == rig.rank.version
    assert stored.snapshot == rig.rank.index.snapshot()


async def test_a_step_written_by_another_collector_is_not_repeated(rig: Rig) -> None:
    """Refused by its base, a poller goes on from what is stored."""
    other = rig.new_poller(rig.store)
    await other.turn()
    await rig.poller.turn()
    await rig.poller.turn()
    rig.rank.store(4)
    await other.turn()
    await other.turn()
    rig.rank.store(5)

    for _ in range(4):
        await rig.poller.turn()

    assert await rig.version() == rig.rank.version


async def test_a_store_that_is_away_is_survived(rig: Rig) -> None:
    """No answer from the store is counted, retried at the back-off, and costs nothing once it is back."""
    away = connect(RedisOptions("unix:///nowhere/r.sock", retries=0))
    lost = rig.new_poller(StateStore(away, "p"))

    pauses = [await lost.turn(), await lost.turn()]

    assert pauses == [BACKOFF_S, BACKOFF_S]
    assert rig.writes("failed") == 2
    await away.aclose()


async def test_an_older_life_never_replaces_a_newer_one(rig: Rig) -> None:
    """An agent whose life is older than the stored one is refused, slowly and without end."""
    newer = StateUpdate("a/0", 9, 99, 5, 0, LoadReport(), KvSnapshot())
    await rig.store.write(newer)

    pauses = [await rig.poller.turn() for _ in range(3)]

    assert pauses[-1] == BACKOFF_S
    assert rig.writes("refused") >= 2
    assert await rig.version() == 5


async def test_an_answer_not_whole_to_a_whole_question_is_a_lie(rig: Rig) -> None:
    """An agent that answers changes where nothing is stored is asked again, not believed."""
    rig.rank.lie = "not_full"

    assert await rig.poller.turn() == BACKOFF_S
    assert await rig.version() == 0
    rig.rank.lie = ""
    await rig.poller.turn()
    assert await rig.version() == rig.rank.version


async def test_a_snapshot_that_is_none_is_refused(rig: Rig) -> None:
    """Hashes that do not ascend are no index: nothing is stored."""
    rig.rank.lie = "order"

    assert await rig.poller.turn() == BACKOFF_S
    assert await rig.version() == 0


async def test_a_rewrite_that_comes_too_late_begins_anew(rig: Rig) -> None:
    """When another collector moved the instance on between question and answer, everything is read again."""
    await rig.poller.turn()
    rig.rank.lie = "stale_whole"
    await rig.store.write(
        StateUpdate("a/0", 1, 1, 50, rig.rank.version, LoadReport(), None, b"", rig.rank.index.digest, 3)
    )
    successor = rig.new_poller(rig.store)

    assert await successor.turn() > 0
    rig.rank.lie = ""
    rig.rank.version = 60
    for _ in range(3):
        await successor.turn()

    assert await rig.version() == 60


async def test_a_big_index_is_taken_too(rig: Rig) -> None:
    """A hundred thousand blocks are checked beside the loop and stored."""
    rig.rank.index.replace(
        KvSnapshot(b"".join(number.to_bytes(8, "little") for number in range(1, 100_001)), b"\1" * 100_000)
    )
    rig.rank.version += 1

    await rig.poller.turn()

    stored = await rig.store.snapshot("a/0")
    assert stored is not None
    assert stored.head.kv_blocks == 100_000
    assert stored.head.kv_digest == rig.rank.index.digest


class _Hasty(Poller):
    """Every poll is over at once and wants the next in 105 ms."""

    async def turn(self) -> float:
        return 0.105


class _Leaping:
    """Time passes only by waiting; after ten waits it is over."""

    def __init__(self) -> None:
        self.at_s = 1_000.0037
        self.begun_s: list[float] = []

    def now_s(self) -> float:
        return self.at_s

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        del event
        self.at_s += timeout_s
        self.begun_s.append(self.at_s)
        return len(self.begun_s) == 10


@pytest.mark.parametrize("tick_ms", [0, 10])
async def test_polls_begin_at_ticks_and_no_rarer_for_it(rig: Rig, tick_ms: int) -> None:
    """Several instances are polled at one waking; over some time the periods are those that were wanted."""
    clock = _Leaping()
    outside = Outside(rig.calls, rig.store, CollectorMetrics(CollectorRegistry(), "p"), clock)
    settings = PollSettings(tick_ms=tick_ms, jitter=0.0)

    await _Hasty(Target("a/0", rig.agent.address), settings, outside).run(asyncio.Event())

    begun_s = clock.begun_s[1:]
    if tick_ms:
        assert all(abs(at_s * 100 - round(at_s * 100)) < 1e-6 for at_s in begun_s)
    assert (begun_s[-1] - clock.begun_s[0]) / 9 == pytest.approx(0.105, abs=0.006)
