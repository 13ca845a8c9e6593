"""Leaders that are stopped past their lease and wake: the standby has taken over, and nothing of theirs is taken."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dualmap.cli.chaos_watch import Watch
from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.client import CallFailed
from dualmap.core.errors import NotLeader
from dualmap.core.rebalance import Cause, Move
from dualmap.rpc.convert_rebalance import MigrateBatch
from dualmap.rpc.operator_calls import RebalancerOperatorCalls, RingOperatorCalls
from dualmap.rpc.queue_calls import QueueCallError, QueueCalls
from dualmap.store.connection import connect
from dualmap.store.ring_store import PublishResult, RingStore
from tests.e2e.conftest import Start
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OPTIONS = LocalOptions(instances=2, ring_managers=2, rebalancers=2, environment={"DUALMAP_LEADER_LEASE_S": "1.0"})
CALL_S = 1.0


@asynccontextmanager
async def _running(start: Start) -> AsyncIterator[tuple[LocalCluster, Watch]]:
    async with start(OPTIONS) as cluster, Watch(cluster) as watch:
        yield cluster, watch


async def _leader(watch: Watch, role: str, *, other_than: str = "") -> str:
    found: list[str] = []

    async def leads() -> bool:
        leader = await watch.leader(role)
        if leader is not None and leader != other_than:
            found.append(leader)
        return bool(found)

    await until(leads, 15)
    return found[0]


async def _never_both(asks: list[Callable[[], Awaitable[bool]]], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert sum(await asyncio.gather(*(ask() for ask in asks))) <= 1
        await asyncio.sleep(0.01)


async def test_a_ring_manager_stopped_past_its_lease_wakes_as_a_standby_and_publishes_nothing(start: Start) -> None:
    """Its fencing epoch is refused by the script, its Drain by itself, and the ring of its successor stays."""
    async with _running(start) as (cluster, watch):
        first = await _leader(watch, "ringmanager")
        client = connect(cluster.redis_url)
        store = RingStore(client, cluster.pool)
        old_fencing = int(await client.hget(store.keys.ring, "fencing_epoch") or 0)
        cluster.services[first].send(signal.SIGSTOP)
        try:
            second = await _leader(watch, "ringmanager", other_than=first)
            async with (
                RingOperatorCalls(cluster.services[first].address) as woken,
                RingOperatorCalls(cluster.services[second].address) as leading,
            ):
                drained = await leading.drain("agent-1/0", CALL_S)
                cluster.services[first].send(signal.SIGCONT)

                await _never_both([lambda: _leads(woken), lambda: _leads(leading)], 2.0)
                with pytest.raises(CallFailed) as refused:
                    await woken.drain("agent-2/0", CALL_S)
                stored = await store.load()
                assert stored is not None
                outcome = await store.publish(stored, old_fencing)
        finally:
            cluster.services[first].send(signal.SIGCONT)
            await client.aclose()

    assert refused.value.reason == NotLeader.reason
    assert outcome.result is PublishResult.FENCED
    assert outcome.stored_fencing_epoch > old_fencing
    assert stored.epoch >= drained.ring_epoch


async def _leads(calls: RingOperatorCalls) -> bool:
    try:
        return (await calls.ring(CALL_S)).leader
    except CallFailed:
        return False


async def test_a_rebalancer_stopped_past_its_lease_wakes_as_a_standby_and_its_batches_are_refused(
    start: Start,
) -> None:
    """Agents take a batch only from the highest fencing epoch they have heard."""
    async with _running(start) as (cluster, watch):
        first = await _leader(watch, "rebalancer")
        async with RebalancerOperatorCalls(cluster.services[first].address) as calls:
            await until(lambda: _has_round(calls), 10)
            old_fencing = (await calls.status(CALL_S)).fencing_epoch
        cluster.services[first].send(signal.SIGSTOP)
        try:
            second = await _leader(watch, "rebalancer", other_than=first)
            async with (
                RebalancerOperatorCalls(cluster.services[first].address) as woken,
                RebalancerOperatorCalls(cluster.services[second].address) as leading,
            ):
                await until(lambda: _has_round(leading), 10)
                new_fencing = (await leading.status(CALL_S)).fencing_epoch
                cluster.services[first].send(signal.SIGCONT)

                await _never_both([lambda: _rebalances(woken), lambda: _rebalances(leading)], 2.0)
            await _send_batch(cluster, new_fencing)
            with pytest.raises(QueueCallError) as refused:
                await _send_batch(cluster, old_fencing)
        finally:
            cluster.services[first].send(signal.SIGCONT)

    assert new_fencing > old_fencing
    assert refused.value.problem.reason == "STALE_LEADER"


async def _has_round(calls: RebalancerOperatorCalls) -> bool:
    status = await calls.status(CALL_S)
    return status.leader and status.fencing_epoch > 0


async def _rebalances(calls: RebalancerOperatorCalls) -> bool:
    try:
        return (await calls.status(CALL_S)).leader
    except CallFailed:
        return False


async def _send_batch(cluster: LocalCluster, fencing_epoch: int) -> None:
    """What a rebalancer of that epoch would send to the first agent: one move of a request that is not there."""
    source, target = "agent-1/0", "agent-2/0"
    address = cluster.services["agent-1"].address
    async with QueueCalls() as calls:
        listed = await calls.list_queue(address, source, False, CALL_S)
        move = Move("nobody", 1, source, target, 1.0, Cause.OVERLOAD)
        await calls.migrate(address, MigrateBatch(source, listed.token, (move,), fencing_epoch, ""), CALL_S)
