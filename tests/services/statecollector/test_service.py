"""What operators and parents see of a collector: its answers, its health, its process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from pydantic import ValidationError

from dualmap.core.state import LoadReport
from dualmap.v1 import state_pb2, state_pb2_grpc
from services.statecollector.app import App
from services.statecollector.settings import PollSettings, ShareSettings
from tests.services.statecollector.conftest import Cluster, collector_process
from tests.services.statecollector.fake_agent import FakeRank
from tests.waiting import until

TIMEOUT_S = 5.0


class Service:
    """A collector that polls three ranks, and a channel to it."""

    def __init__(self, cluster: Cluster, app: App, ranks: list[FakeRank]) -> None:
        self.cluster = cluster
        self.app = app
        self.ranks = ranks
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.port}")
        self.stub: state_pb2_grpc.StateCollectorAsyncStub = state_pb2_grpc.StateCollectorStub(self.channel)


@pytest_asyncio.fixture
async def service(cluster: Cluster) -> AsyncIterator[Service]:
    """Three ranks polled, all stored."""
    ranks = [FakeRank(f"a/{number}") for number in range(3)]
    await cluster.agent(*ranks)
    await cluster.publish()
    running = Service(cluster, await cluster.collector(), ranks)
    for rank in ranks:
        await cluster.until_stored(rank)
    yield running
    await running.channel.close()


async def test_instances_are_listed_in_pages(service: Service) -> None:
    """Every member once, by id, with ring epoch, load, who polls it and how long ago."""
    service.ranks[1].set_load(LoadReport(rest_s=2.5, running_requests=3))
    await service.cluster.until_stored(service.ranks[1])

    first = await service.stub.ListInstances(state_pb2.ListInstancesRequest(page_size=2), timeout=TIMEOUT_S)
    second = await service.stub.ListInstances(
        state_pb2.ListInstancesRequest(pool="p", page_size=2, page_token=first.next_page_token), timeout=TIMEOUT_S
    )

    found = [*first.instances, *second.instances]
    assert [summary.instance_id for summary in found] == ["a/0", "a/1", "a/2"]
    assert second.next_page_token == ""
    assert first.ring_epoch == 1
    assert found[1].load.rest_s == 2.5
    assert all(summary.reachable and summary.collector and summary.polled_ago_ms >= 0 for summary in found)


async def test_one_instance_is_shown(service: Service) -> None:
    """A member's identity and index as stored; a stranger is NOT_FOUND."""
    service.ranks[0].store(1, 2)
    await service.cluster.until_stored(service.ranks[0])

    answer = await service.stub.GetInstance(state_pb2.GetInstanceRequest(instance_id="a/0"), timeout=TIMEOUT_S)

    assert answer.instance.kv_blocks == 2
    assert answer.instance.kv_digest == service.ranks[0].index.digest
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.stub.GetInstance(state_pb2.GetInstanceRequest(instance_id="x/0"), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_member_without_state_is_shown_as_such(service: Service) -> None:
    """A joined instance that never answered is listed: version 0, not reachable."""
    silent = FakeRank("b/0", broken=True)
    await service.cluster.agent(silent)
    await service.cluster.publish()
    await until(lambda: "b/0" in service.app.roster.polled)

    answer = await service.stub.GetInstance(state_pb2.GetInstanceRequest(instance_id="b/0"), timeout=TIMEOUT_S)

    assert (answer.instance.version, answer.instance.reachable) == (0, False)


async def test_bad_requests_are_refused_by_field(service: Service) -> None:
    """Another pool is NOT_FOUND, a page beyond the limit INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as other_pool:
        await service.stub.ListInstances(state_pb2.ListInstancesRequest(pool="q"), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as too_big:
        await service.stub.ListInstances(state_pb2.ListInstancesRequest(page_size=1_001), timeout=TIMEOUT_S)

    assert other_pool.value.code() is grpc.StatusCode.NOT_FOUND
    assert too_big.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "page_size" in str(too_big.value.details())


async def test_a_watch_gives_all_then_each_change(service: Service) -> None:
    """Snapshot first, then what changed, then who left; only of the instances asked for."""
    request = state_pb2.WatchStateRequest(instance_ids=["a/0", "a/1"])
    watch = service.stub.WatchState(request, timeout=30)
    messages = aiter(watch)
    first = await anext(messages)
    service.ranks[2].store(9)
    service.ranks[0].store(9)
    seen: list[state_pb2.InstanceSummary] = []
    async for message in messages:
        seen.extend(message.instances)
        if any(summary.version == service.ranks[0].version for summary in message.instances):
            break
    await service.cluster.publish("a/1")
    left: list[str] = []
    async for message in messages:
        left.extend(message.left_instance_ids)
        if left:
            break
    watch.cancel()

    assert first.snapshot
    assert [summary.instance_id for summary in first.instances] == ["a/0", "a/1"]
    assert {summary.instance_id for summary in seen} <= {"a/0", "a/1"}
    assert left == ["a/1"]


async def test_a_stop_ends_watches_within_the_grace(cluster: Cluster) -> None:
    """An endless stream does not use the grace up."""
    rank = FakeRank("a/0")
    await cluster.agent(rank)
    await cluster.publish()
    async with asyncio.timeout(10), App(cluster.settings()) as app:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.port}")
        stub: state_pb2_grpc.StateCollectorAsyncStub = state_pb2_grpc.StateCollectorStub(channel)
        watch = stub.WatchState(state_pb2.WatchStateRequest(), timeout=30)
        await anext(aiter(watch))

    async with asyncio.timeout(5):
        async for _ in watch:
            pass
    await channel.close()


async def test_health_names_its_components(service: Service) -> None:
    """Readiness is Redis answering; a misconfigured Redis is a red component of its own."""
    check = service.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )

    async def status(name: str) -> int:
        answer = await check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        return int(answer.status)

    assert await status("") == health_pb2.HealthCheckResponse.SERVING
    assert await status("redis") == health_pb2.HealthCheckResponse.SERVING
    assert await status("redis_config") == health_pb2.HealthCheckResponse.SERVING
    await service.cluster.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        await service.app.redis_check.turn()
        assert await status("redis_config") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("") == health_pb2.HealthCheckResponse.SERVING
    finally:
        await service.cluster.client.config_set("maxmemory-policy", "noeviction")


async def test_the_program_serves_and_stops(cluster: Cluster) -> None:
    """As a process: one JSON line with its ports, states in Redis, and SIGTERM ends it with code 0."""
    rank = FakeRank("a/0")
    rank.store(1)
    await cluster.agent(rank)
    await cluster.publish()
    async with collector_process(cluster.url) as (process, line):
        await cluster.until_stored(rank)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await process.wait()

    assert line["event"] == "serving"
    assert line["port"]
    assert line["metrics_port"]
    assert process.returncode == 0


def test_settings_that_contradict_each_other_are_refused() -> None:
    """A registration shorter than two beats, or a back-off shorter than the interval, is an error at start."""
    with pytest.raises(ValidationError, match="twice beat_ms"):
        ShareSettings(beat_ms=1_000, ttl_ms=1_500)
    with pytest.raises(ValidationError, match="backoff_ms"):
        PollSettings(interval_ms=500, backoff_ms=100)
    with pytest.raises(ValidationError, match="miss its turn"):
        PollSettings(interval_ms=20, tick_ms=30)
