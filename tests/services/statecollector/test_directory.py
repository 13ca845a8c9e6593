"""Watches and failures of the store, from inside: a slow reader is cut off, a lost store is said and survived."""

from __future__ import annotations

import asyncio
import signal

import grpc
import grpc.aio
import pytest

from dualmap.core.errors import Overloaded
from dualmap.runtime.lifetime import StartError
from dualmap.v1 import state_pb2, state_pb2_grpc
from services.statecollector.app import App
from services.statecollector.change_feed import ChangeFeed
from services.statecollector.directory import QUEUED_CHANGES, Directory
from tests.redis_process import RedisServer
from tests.services.statecollector.conftest import Cluster
from tests.services.statecollector.fake_agent import FakeRank
from tests.waiting import until

TIMEOUT_S = 5.0


async def directory_of(cluster: Cluster, app: App) -> Directory:
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    await cluster.until_stored(rank)
    await until(lambda: app.roster.members == ("a/0",))
    return Directory(cluster.states, app.roster, app._metrics)


def counted(app: App, name: str) -> float:
    return app._registry.get_sample_value(f"dualmap_collector_{name}_total", {"pool": "p"}) or 0.0


async def test_a_slow_watcher_is_cut_off_and_the_others_are_not(cluster: Cluster) -> None:
    """A reader whose queue is full hears that it reads too slowly; a quick one goes on."""
    app = await cluster.collector()
    directory = await directory_of(cluster, app)
    slow, quick = directory.watch(()), directory.watch(())
    assert (await anext(slow)).snapshot
    assert (await anext(quick)).snapshot

    for _ in range(QUEUED_CHANGES + 1):
        await directory.tell(["a/0", "stranger/0"], [])
        assert len((await anext(quick)).changed) == 1

    assert counted(app, "watchers_cut_off") == 1
    with pytest.raises(Overloaded):
        await anext(slow)


async def test_a_watch_ends_with_the_process(cluster: Cluster) -> None:
    """Closing ends open watches, full ones too, and new ones at once."""
    directory = await directory_of(cluster, await cluster.collector())
    open_watch = directory.watch(())
    await anext(open_watch)
    for _ in range(QUEUED_CHANGES):
        await directory.tell(["a/0"], [])

    directory.close()

    assert [change async for change in open_watch] == []
    assert [change async for change in directory.watch(())] == []


async def test_only_what_was_asked_for_is_told(cluster: Cluster) -> None:
    """Changes of other instances make no message at all."""
    directory = await directory_of(cluster, await cluster.collector())
    watch = directory.watch(["other/0"])
    first = await anext(watch)

    await directory.tell(["a/0"], [])
    await directory.tell([], ["other/0", "third/0"])

    assert first.changed == ()
    assert (await anext(watch)).left == ("other/0",)
    await watch.aclose()


async def test_a_feed_without_a_store_waits_and_tries_again(cluster: Cluster) -> None:
    """A store that does not answer is counted; the loop goes on and ends when told."""
    app = await cluster.collector()
    directory = await directory_of(cluster, app)
    watch = directory.watch(())
    await anext(watch)
    broken = cluster.states
    await cluster.client.delete(broken.keys.stream(0))
    await cluster.client.set(broken.keys.stream(0), "not a stream")
    feed = ChangeFeed(broken, app.roster, directory, app._metrics)
    stop = asyncio.Event()
    running = asyncio.create_task(feed.run(stop))

    await until(lambda: counted(app, "feed_failures") == 2)

    stop.set()
    await running
    await watch.aclose()


async def test_a_lost_store_is_unavailable_to_operators_and_red(cluster: Cluster, redis_server: RedisServer) -> None:
    """Without Redis the collector is not ready and answers UNAVAILABLE, and is itself again when Redis is back."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    app = await cluster.collector()
    await cluster.until_stored(rank)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.port}")
    stub: state_pb2_grpc.StateCollectorAsyncStub = state_pb2_grpc.StateCollectorStub(channel)

    redis_server.process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: not app.health.ready, timeout_s=10)
        codes = []
        for call in (
            stub.ListInstances(state_pb2.ListInstancesRequest(), timeout=TIMEOUT_S),
            stub.GetInstance(state_pb2.GetInstanceRequest(instance_id="a/0"), timeout=TIMEOUT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            codes.append(failed.value.code())
        with pytest.raises(grpc.aio.AioRpcError) as watch_failed:
            await anext(aiter(stub.WatchState(state_pb2.WatchStateRequest(), timeout=TIMEOUT_S)))
        codes.append(watch_failed.value.code())
    finally:
        redis_server.process.send_signal(signal.SIGCONT)

    assert codes == [grpc.StatusCode.UNAVAILABLE] * 3
    await until(lambda: app.health.ready, timeout_s=10)
    rank.store(4)
    await cluster.until_stored(rank)
    await channel.close()


async def test_a_collector_without_redis_says_so_and_does_not_start(cluster: Cluster) -> None:
    """One line for the operator, not a process that pretends to work."""
    settings = cluster.settings()
    redis = settings.redis.model_copy(update={"url": "unix:///nowhere/r.sock", "start_timeout_s": 0.2})
    app = App(settings.model_copy(update={"redis": redis}))

    with pytest.raises(StartError, match=r"Redis at unix:///nowhere/r\.sock does not answer"):
        await app.__aenter__()
