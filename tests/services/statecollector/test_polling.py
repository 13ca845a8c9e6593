"""What agents say reaches Redis, and nothing an agent does wrong reaches further than itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dualmap.core.state import LoadReport
from dualmap.store.keys import shard_of
from dualmap.store.streams import START
from services.statecollector.app import App
from services.statecollector.settings import PollSettings
from tests.services.statecollector.conftest import FAST_POLL, Cluster
from tests.services.statecollector.fake_agent import FakeRank
from tests.waiting import until


def counted(app: App, name: str, **labels: str) -> float:
    return app._registry.get_sample_value(f"dualmap_collector_{name}_total", {"pool": "p", **labels}) or 0.0


async def test_states_of_all_ranks_reach_redis(cluster: Cluster) -> None:
    """First whole, which is what makes an instance ACTIVE, then each change, for every rank of an agent."""
    one, two = FakeRank("a/0"), FakeRank("a/1")
    one.store(1, 2, 3)
    await cluster.agent(one, two)
    await cluster.publish()
    app = await cluster.collector()

    await cluster.until_stored(one)
    await cluster.until_stored(two)
    one.store(4)
    two.set_load(LoadReport(rest_s=2.0, running_requests=1))
    await cluster.until_stored(one)
    await cluster.until_stored(two)

    stored = await cluster.states.snapshot("a/1")
    assert stored is not None
    assert stored.head.load == two.load
    assert app.health.ready
    whole = [query for query in one.polls if query.full]
    assert len(whole) == 1


async def test_a_dead_agent_is_unreachable_at_once_and_returns(cluster: Cluster) -> None:
    """Two failed polls are written; the first good one takes it back."""
    rank = FakeRank("a/0")
    agent = await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)

    rank.broken = True
    await cluster.until_reachable("a/0", reachable=False)
    rank.broken = False
    await cluster.until_reachable("a/0", reachable=True)
    await agent.stop()
    await cluster.until_reachable("a/0", reachable=False)
    await agent.start(agent.address)
    rank.store(9)
    await cluster.until_stored(rank)

    assert counted(app, "unreachable_marks") == 2
    assert counted(app, "polls", reason="unavailable") >= 4


async def test_one_lost_poll_marks_nothing(cluster: Cluster) -> None:
    """A single failure is repeated, not judged."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)

    rank.fail_next = 1
    await until(lambda: counted(app, "polls", reason="unavailable") == 1)
    rank.store(5)
    await cluster.until_stored(rank)

    assert counted(app, "unreachable_marks") == 0


async def test_a_slow_agent_delays_nobody(cluster: Cluster) -> None:
    """While one agent lets every poll time out, the others are as fresh as ever."""
    slow, quick = FakeRank("slow/0"), FakeRank("quick/0")
    await cluster.agent(slow)
    await cluster.agent(quick)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(slow)
    await cluster.until_stored(quick)

    slow.delay_s = 30
    await cluster.until_reachable("slow/0", reachable=False)
    before = len(quick.polls)
    quick.store(7)
    await cluster.until_stored(quick)
    await until(lambda: len(quick.polls) > before + 5)

    head = await cluster.head("quick/0")
    assert head is not None
    assert head.reachable


async def test_an_idle_agent_holds_its_answer(cluster: Cluster) -> None:
    """An idle agent is asked to wait for news: few polls while nothing happens, and news at once."""
    rank = FakeRank("a/0", load=LoadReport())
    await cluster.agent(rank)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(rank)
    await until(lambda: rank.polls[-1].wait_ms == FAST_POLL.hold_ms)

    rank.store(5)
    await cluster.until_stored(rank)
    entries = await cluster.states.read_stream({shard_of("a/0"): START}, block_ms=0)

    assert entries[-1].change is not None
    rank.set_load(LoadReport(running_requests=1))
    await until(lambda: rank.polls[-1].wait_ms == 0)


async def test_holding_can_be_switched_off(cluster: Cluster) -> None:
    """With hold_ms 0 an idle agent is asked like a busy one."""
    rank = FakeRank("a/0", load=LoadReport())
    await cluster.agent(rank)
    await cluster.publish()
    await cluster.collector(FAST_POLL.model_copy(update={"hold_ms": 0}))
    await until(lambda: len(rank.polls) > 4)

    assert {query.wait_ms for query in rank.polls} == {0}


async def test_a_restarted_engine_and_a_restarted_agent_are_taken_whole(cluster: Cluster) -> None:
    """A new life of either replaces what is stored, also when its versions begin again."""
    rank = FakeRank("a/0")
    rank.store(1, 2, 3)
    await cluster.agent(rank)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(rank)

    rank.restart_engine()
    await cluster.until_stored(rank)
    rank.restart_agent()
    rank.store(8)
    await cluster.until_stored(rank)

    stored = await cluster.states.snapshot("a/0")
    assert stored is not None
    assert stored.head.kv_blocks == 1


@pytest.mark.parametrize(("lie", "reason"), [("digest", "digest"), ("version", "version")])
async def test_a_lying_change_is_not_stored(cluster: Cluster, lie: str, reason: str) -> None:
    """Changes that lead elsewhere than the agent says, or versions that fall: counted, and all is asked for anew."""
    rank = FakeRank("a/0")
    rank.store(1)
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)

    rank.lie = lie
    rank.store(2)
    await until(lambda: counted(app, "lies", reason=reason) >= 1)
    await cluster.until_stored(rank)
    rank.lie = ""
    rank.store(3)
    await cluster.until_stored(rank)

    stored = await cluster.states.snapshot("a/0")
    assert stored is not None
    assert stored.head.reachable


async def test_a_whole_state_is_stored_with_the_digest_it_really_has(cluster: Cluster) -> None:
    """Followers must not be sent in circles by a digest that no index can have."""
    rank = FakeRank("a/0", lie="whole_digest")
    rank.store(1)
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()

    await cluster.until_stored(rank)

    assert counted(app, "lies", reason="digest") >= 1


async def test_an_answer_about_another_instance_is_refused(cluster: Cluster) -> None:
    """An agent that mixes its instances up counts as not answering."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)

    rank.lie = "name"
    await cluster.until_reachable("a/0", reachable=False)
    rank.lie = ""
    await cluster.until_stored(rank)

    assert counted(app, "lies", reason="invalid") >= 1


async def test_a_huge_answer_is_refused(cluster: Cluster) -> None:
    """An answer over the limit is not taken into memory: the poll fails and the collector lives."""
    rank, other = FakeRank("a/0"), FakeRank("b/0")
    await cluster.agent(rank)
    await cluster.agent(other)
    await cluster.publish()
    app = await cluster.collector(FAST_POLL.model_copy(update={"max_answer_bytes": 65_536}))
    await cluster.until_stored(rank)

    rank.store(*range(1, 10_000))
    await cluster.until_reachable("a/0", reachable=False)
    other.store(3)
    await cluster.until_stored(other)

    assert counted(app, "polls", reason="resource_exhausted") >= 2


async def test_an_emptied_store_is_filled_again(cluster: Cluster) -> None:
    """After Redis lost its data and has a ring again, every state is whole without any restart."""
    rank = FakeRank("a/0")
    rank.store(1, 2)
    await cluster.agent(rank)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(rank)

    await cluster.client.flushall()
    await cluster.publish()

    await cluster.until_stored(rank)
    stored = await cluster.states.snapshot("a/0")
    assert stored is not None
    assert stored.snapshot == rank.index.snapshot()


async def test_a_packed_index_that_falls_behind_is_rewritten(cluster: Cluster) -> None:
    """Under churn the packed index is asked for anew before the stream's trim reaches it, and no step is repeated."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)
    keys = cluster.states.keys
    # First a change that the packed index lacks: until then each poll without news moves its position on.
    rank.store(1)
    await cluster.until_stored(rank)
    await cluster.client.incrby(keys.added(shard_of("a/0")), cluster.states.max_entries)

    await until(lambda: counted(app, "writes", reason="rewritten") >= 1)
    rank.store(2)
    await cluster.until_stored(rank)

    changes = [
        entry.change
        for entry in await cluster.states.read_stream({shard_of("a/0"): START}, block_ms=0)
        if entry.change is not None
    ]
    assert sum(change.full for change in changes) == 1
    assert all(before.version == after.since for before, after in pairwise(changes))


async def test_a_departed_instance_is_forgotten(cluster: Cluster) -> None:
    """What left the ring is neither polled nor kept."""
    one, two = FakeRank("a/0"), FakeRank("b/0")
    await cluster.agent(one)
    await cluster.agent(two)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(one)
    await cluster.until_stored(two)

    await cluster.publish("b/0")

    async def forgotten() -> bool:
        return await cluster.states.known_instances() == {"a/0"}

    await until(forgotten)
    polls = len(two.polls)
    before = len(one.polls)
    await until(lambda: len(one.polls) > before + 5)
    assert len(two.polls) == polls


async def test_an_agent_that_moved_is_polled_at_its_new_address(cluster: Cluster) -> None:
    """A member that comes back on another port is followed there."""
    rank = FakeRank("a/0")
    agent = await cluster.agent(rank)
    await cluster.publish()
    await cluster.collector()
    await cluster.until_stored(rank)

    await agent.stop()
    await agent.start()
    rank.restart_agent()
    rank.store(3)
    await cluster.publish()

    await cluster.until_stored(rank)


async def test_a_broken_poll_is_repeated_soon(cluster: Cluster) -> None:
    """The second try after a failure comes within the interval, not after the back-off."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    settings = PollSettings(interval_ms=20, timeout_ms=150, hold_ms=0, backoff_ms=60_000)
    await cluster.collector(settings)
    await cluster.until_stored(rank)

    rank.broken = True
    polls = len(rank.polls)
    await until(lambda: len(rank.polls) >= polls + 3)
    rank.broken = False
    await cluster.until_reachable("a/0", reachable=True)
