"""Redis comes back empty or with its data, ring managers are gone with it for ten leases: callers notice nothing."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dualmap.cli.chaos_load import Load
from dualmap.cli.chaos_watch import Watch
from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.client import DualMapClient
from dualmap.core.membership import InstanceState
from dualmap.store.connection import connect
from tests.e2e.conftest import Start
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LEASE_S = 1.0
SHORT_LEASES = {"DUALMAP_LEASE__LEASE_S": f"{LEASE_S}", "DUALMAP_LEASE__TURN_S": "0.05"}


@asynccontextmanager
async def _loaded(cluster: LocalCluster) -> AsyncIterator[Load]:
    """Requests all the while; when the block ends, each of them has kept its promises."""
    stop = asyncio.Event()
    async with DualMapClient(cluster.router_addresses) as client:
        load = Load(client, seed=1, rate=6.0, prefix="recovery")
        sending = asyncio.create_task(load.run(stop))
        try:
            yield load
        finally:
            stop.set()
            await sending
            await load.finish()
    assert not [f"{seen.request_id}: {problem}" for seen in load.seen if (problem := seen.problem())]
    assert all(seen.done for seen in load.seen)


async def _agree(watch: Watch) -> bool:
    return not await watch.differing()


async def _metric(address: str | None, name: str, label: str = "") -> float:
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read())
    lines = text.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


async def _restart_redis(cluster: LocalCluster, *, empty: bool, away_s: float) -> None:
    assert cluster.valkey is not None
    cluster.valkey.send(signal.SIGKILL)
    await asyncio.sleep(away_s)
    await cluster.valkey.restart(empty=empty)


async def test_an_emptied_redis_is_filled_again_by_those_who_know_and_epochs_never_fall(start: Start) -> None:
    """Membership, loads and indexes come back from ring manager and agents; routers answer all the while."""
    async with start(LocalOptions(instances=2, speed=5.0, restartable=True)) as cluster, Watch(cluster) as watch:
        await until(watch.all_see_all, 15)
        before = (await cluster.ring()).epoch
        async with _loaded(cluster):
            await asyncio.sleep(1.0)
            await _restart_redis(cluster, empty=True, away_s=1.5)
            await until(watch.all_see_all, 20)
            await asyncio.sleep(1.0)
        await until(lambda: _agree(watch), 2.5)
        after = await cluster.ring()

    assert after.epoch > before
    assert {member.instance_id for member in after.members} == {"agent-1/0", "agent-2/0"}


@pytest.mark.parametrize("damaged", [False, True], ids=["flushed", "every key of another type"])
async def test_a_redis_emptied_or_damaged_while_it_runs_is_put_right(start: Start, damaged: bool) -> None:
    """No connection breaks to tell of it: writers and followers notice by what they find, callers not at all."""
    async with start(LocalOptions(instances=2, speed=5.0)) as cluster, Watch(cluster) as watch:
        await until(watch.all_see_all, 15)
        before = (await cluster.ring()).epoch
        assert cluster.valkey is not None
        client = connect(cluster.valkey.url)
        async with _loaded(cluster):
            await asyncio.sleep(1.0)
            if damaged:
                for key in await client.keys():
                    await client.set(key, "nonsense")
            else:
                await client.flushall()

            async def raised() -> bool:
                return (await cluster.ring()).epoch > before

            await until(raised, 20)
            await until(watch.all_see_all, 20)
            await asyncio.sleep(1.0)
        await until(lambda: _agree(watch), 2.5)
        await client.aclose()


async def test_a_redis_that_kept_its_data_costs_no_full_state(start: Start) -> None:
    """No agent is asked for everything, and the router goes on from where it was."""
    async with start(LocalOptions(instances=2, speed=5.0, restartable=True)) as cluster, Watch(cluster) as watch:
        await until(watch.all_see_all, 15)
        collector = cluster.services["statecollector-1"].metrics_address
        async with _loaded(cluster):
            await asyncio.sleep(1.0)
            whole = await _metric(collector, "dualmap_collector_writes_total", 'reason="whole"')
            rewritten = await _metric(collector, "dualmap_collector_writes_total", 'reason="rewritten"')
            await _restart_redis(cluster, empty=False, away_s=1.5)
            await until(watch.all_see_all, 20)
            await asyncio.sleep(1.0)
            whole_after = await _metric(collector, "dualmap_collector_writes_total", 'reason="whole"')
            rewritten_after = await _metric(collector, "dualmap_collector_writes_total", 'reason="rewritten"')
        await until(lambda: _agree(watch), 2.5)
        log = cluster.services["router-1"].spec.log_path.read_text()

    assert (whole_after, rewritten_after) == (whole, rewritten)
    assert '"about":"resumed"' in log.replace(" ", "")


@pytest.mark.parametrize("empty", [False, True], ids=["with data", "empty"])
async def test_nobody_is_removed_while_ring_manager_and_redis_are_both_gone_for_ten_leases(
    start: Start, empty: bool
) -> None:
    """Both come back as new processes: every instance is a member, none was judged, routers answered throughout."""
    options = LocalOptions(instances=3, speed=5.0, restartable=True, environment=SHORT_LEASES)
    async with start(options) as cluster, Watch(cluster) as watch:
        await until(watch.all_see_all, 15)
        before = (await cluster.ring()).epoch
        async with _loaded(cluster):
            cluster.services["ringmanager-1"].send(signal.SIGKILL)
            await _restart_redis(cluster, empty=empty, away_s=10 * LEASE_S)
            await cluster.start("ringmanager-1")
            await until(watch.all_see_all, 20)
            await asyncio.sleep(3 * LEASE_S)
            ring = await cluster.ring()
        log = cluster.services["ringmanager-1"].spec.log_path.read_text()

    assert [member.state for member in ring.members] == [InstanceState.ACTIVE] * 3
    assert ring.epoch >= before
    assert "lease_expired" not in log
