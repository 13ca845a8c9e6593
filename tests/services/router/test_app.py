"""The whole router process against a real Redis: ready when it has a view, degraded without Redis, gone on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dualmap.core.kv_index import KvIndex
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.clients import sync_channel
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from dualmap.v1 import router_pb2, router_pb2_grpc
from dualmap.v1.types_pb2 import REASON_CACHE_HIT, REASON_DEGRADED
from tests.services.router.harness import AGENT_EPOCH, chain_of_blocks, request, ring_of

DEAD_REDIS = "unix:///nowhere/redis.sock"


class RouterProcess:
    """A started router with its channel."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.channel = sync_channel(f"127.0.0.1:{port}")
        self.stub = router_pb2_grpc.RouterStub(self.channel)
        self._check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse] = (
            self.channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
        )

    def healthy(self, component: str = "") -> bool:
        answer = self._check(health_pb2.HealthCheckRequest(service=component), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


@contextmanager
def router_process(redis_url: str, *, ring_file: Path | None = None) -> Iterator[RouterProcess]:
    variables = {
        "PATH": "/usr/bin:/bin",
        "DUALMAP_REDIS__URL": redis_url,
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
        "DUALMAP_SERVER__DRAIN_GRACE_S": "2",
    }
    if ring_file is not None:
        variables["DUALMAP_ROUTER__RING_FILE"] = str(ring_file)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.router"],
        stdout=subprocess.PIPE,
        env=variables,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        assert line["event"] == "serving"
        assert line["metrics_port"] > 0
        router = RouterProcess(process, line["port"])
        yield router
        router.channel.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait, bounded, until something another process does has happened."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


async def publish(redis_url: str, hashes: tuple[int, ...] = (), epoch: int = 5) -> None:
    """Store a ring of three and their states."""
    client = connect(redis_url)
    ring = ring_of(3, epoch)
    assert (await RingStore(client, "default").publish(ring, fencing_epoch=1)).published
    index = KvIndex()
    snapshot = KvSnapshot(struct.pack(f"<{len(hashes)}Q", *sorted(hashes)), b"\1" * len(hashes))
    index.replace(snapshot)
    for member in ring.members:
        update = StateUpdate(
            member.instance_id, 1, AGENT_EPOCH, 1, 0, LoadReport(), snapshot, b"", index.digest, len(hashes)
        )
        await StateStore(client, "default").write(update)
    await client.aclose()


def test_a_router_serves_once_it_has_a_view_and_follows_it(redis_url: str) -> None:
    """NOT_SERVING before the first ring; then it routes by the index it read, and leaves cleanly on SIGTERM."""
    hashes = chain_of_blocks(1, 8)
    with router_process(redis_url) as router:
        assert not router.healthy()
        assert not router.healthy("ring")
        with pytest.raises(grpc.RpcError) as early:
            router.stub.Route(request("early", hashes), timeout=5)
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE

        asyncio.run(publish(redis_url, hashes))
        until(router.healthy, "the router never became ready")
        until(lambda: heard(router) == 3, "the states were never read")
        answer = router.stub.Route(request("r", hashes), timeout=5)
        open_stream = router.stub.RouteStream(iter_forever(), timeout=30)
        assert next(open_stream).response.instance.instance_id

        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(timeout=8) == 0

    assert answer.ring_epoch == 5
    assert answer.hit_tokens == 8 * 128
    assert answer.state_age_ms < 10_000
    assert answer.reason != REASON_CACHE_HIT  # all three hold it: equal hits, the lower prediction decides


def heard(router: RouterProcess) -> int:
    view = router.stub.GetView(router_pb2.GetViewRequest(), timeout=5)
    return sum(found.kv_blocks == 8 for found in view.instances)


def iter_forever() -> Iterator[router_pb2.RouteStreamRequest]:
    yield router_pb2.RouteStreamRequest(request=request("streamed", (1,)))
    time.sleep(20)


def test_a_router_starts_from_its_ring_file_when_redis_is_away(redis_url: str, tmp_path: Path) -> None:
    """The file written with Redis serves without it: DEGRADED, never an error."""
    ring_file = tmp_path / "ring.bin"
    with router_process(redis_url, ring_file=ring_file) as router:
        asyncio.run(publish(redis_url))
        until(router.healthy, "the router never became ready")
        until(ring_file.exists, "the ring was never saved")

    with router_process(DEAD_REDIS, ring_file=ring_file) as router:
        until(router.healthy, "the router never took the file")
        answer = router.stub.Route(request("r", chain_of_blocks(1, 4)), timeout=5)
        view = router.stub.GetView(router_pb2.GetViewRequest(), timeout=5)
        assert not router.healthy("redis")

    assert (answer.reason, answer.ring_epoch) == (REASON_DEGRADED, 5)
    assert view.degraded
