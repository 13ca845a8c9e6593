"""A real router server on a free port over a view filled by hand, with a clock that tests move."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from dualmap.core.choose import ChooseOptions
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot, Split
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.admission import Admission
from dualmap.rpc.clients import sync_channel
from dualmap.rpc.direct_calls import Queue
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.server import ServerParts, SyncServer
from dualmap.runtime.health import Health
from dualmap.runtime.settings import ServerSettings
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import router_pb2, router_pb2_grpc
from dualmap.v1.types_pb2 import BlockHashes, Prompt
from dualmap.view.cluster_view import ClusterView, ViewOptions
from services.router.decider import Decider, RouterFacts
from services.router.heat_sampler import HeatSampler
from services.router.metrics import RouterMetrics
from services.router.servicer import RouterServicer, RouteStreams, register
from services.router.spans import RouteSpans

ROUTER_ID = 0xD0A1
AGENT_EPOCH = 77


class HandClock:
    """Milliseconds that only tests move."""

    def __init__(self) -> None:
        self.ms = 1_000_000.0

    def __call__(self) -> float:
        return self.ms


@dataclass
class Pool:
    """A view of a few instances, all heard of just now."""

    clock: HandClock
    view: ClusterView
    versions: dict[str, int] = field(default_factory=dict)

    def adopt(self, ring: RingSnapshot) -> None:
        self.view.adopt_ring(ring)
        self.view.degraded = False

    def hear(self, instance_id: str, load: LoadReport, hashes: tuple[int, ...] = ()) -> None:
        """Take in a whole state of an instance."""
        version = self.versions[instance_id] = self.versions.get(instance_id, 0) + 1
        view = self.view.instances[instance_id]
        snapshot = KvSnapshot(struct.pack(f"<{len(hashes)}Q", *sorted(hashes)), b"\1" * len(hashes))
        scratch = type(view.kv)()
        scratch.replace(snapshot)
        update = StateUpdate(
            instance_id, 1, AGENT_EPOCH, version, 0, load, snapshot, kv_digest=scratch.digest, kv_blocks=len(hashes)
        )
        with self.view.lock:
            assert view.apply(update, self.clock())

    def set_state(self, instance_id: str, state: InstanceState) -> None:
        """Publish the same ring with one member in another state."""
        ring = self.view.ring
        assert ring is not None
        members = tuple(
            replace(member, state=state) if member.instance_id == instance_id else member for member in ring.members
        )
        self.adopt(replace(ring, epoch=ring.epoch + 1, members=members))


def ring_of(count: int, epoch: int = 5, splits: tuple[Split, ...] = ()) -> RingSnapshot:
    """A ring of ACTIVE members agent-0/0, agent-1/0 …."""
    members = tuple(
        Member(
            f"agent-{number}/0",
            f"127.0.0.1:{7100 + number}",
            f"127.0.0.1:{8100 + number}",
            InstanceState.ACTIVE,
            agent_epoch=AGENT_EPOCH,
        )
        for number in range(count)
    )
    return RingSnapshot("default", epoch, RingParameters(), members, splits)


def pool_of(count: int) -> Pool:
    """A pool whose instances are idle and empty; none at all for 0 members: then no ring is known either."""
    clock = HandClock()
    pool = Pool(clock, ClusterView("default", threading.Lock(), clock, ViewOptions(ROUTER_ID)))
    if count:
        pool.adopt(ring_of(count))
        for instance_id in pool.view.instances:
            pool.hear(instance_id, LoadReport())
    return pool


@dataclass
class Router:
    """The running router and a stub before it."""

    pool: Pool
    decider: Decider
    metrics: RouterMetrics
    sampler: HeatSampler
    server: SyncServer
    servicer: RouterServicer
    streams: RouteStreams
    channel: grpc.Channel
    registry: CollectorRegistry

    @property
    def stub(self) -> router_pb2_grpc.RouterStub:
        return router_pb2_grpc.RouterStub(self.channel)

    def route(self, request: router_pb2.RouteRequest, **options: object) -> router_pb2.RouteResponse:
        return self.stub.Route(request, timeout=5, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Limits:
    """What a test may tighten."""

    waiting: int = 256
    burst_s: float = 0.025
    streams: int = 64
    message_bytes: int = 4 * 1024 * 1024
    samples: int = 1024
    options: ChooseOptions = field(default_factory=ChooseOptions)
    models: tuple[str, ...] = ("default", "alias")


@contextmanager
def running_router(
    pool: Pool, limits: Limits | None = None, provider: TracerProvider | None = None
) -> Iterator[Router]:
    """Serve the pool's view until the block is left."""
    limits = limits or Limits()
    metrics = RouterMetrics("default")
    sampler = HeatSampler(limits.samples, lambda: 0.5)
    facts = RouterFacts(ROUTER_ID, "default", limits.models, b"", limits.options)
    decider = Decider(pool.view, facts, metrics, sampler, lambda: 0.5)
    servicer = RouterServicer(decider, RouteSpans(provider) if provider else None)
    streams = RouteStreams(servicer, metrics, limits.streams)
    registry = CollectorRegistry()
    registry.register(metrics)
    settings = ServerSettings(drain_grace_s=2, max_concurrent_rpcs=1024, max_message_bytes=limits.message_bytes)
    parts = ServerParts(Health(), RpcMetrics(registry), Telemetry(trace.NoOpTracerProvider()))
    queue = Queue(Admission(limits.waiting, limits.burst_s), decider.overloaded)
    server = SyncServer(settings, parts, threads=2, queue=queue)
    server.add(lambda one, registrar: register(one, streams, registrar), servicer)
    port = server.start()
    channel = sync_channel(f"127.0.0.1:{port}")
    try:
        yield Router(pool, decider, metrics, sampler, server, servicer, streams, channel, registry)
    finally:
        channel.close()
        streams.end()
        server.stop()


def request(
    request_id: str, hashes: tuple[int, ...] = (), prompt_tokens: int = 0, attempt: int = 1, **fields: object
) -> router_pb2.RouteRequest:
    """A request by hashes."""
    prompt = Prompt(block_hashes=BlockHashes(hashes=hashes, prompt_tokens=prompt_tokens or max(1, 128 * len(hashes))))
    return router_pb2.RouteRequest(request_id=request_id, attempt=attempt, prompt=prompt, **fields)  # type: ignore[arg-type]


def chain_of_blocks(seed: int, blocks: int) -> tuple[int, ...]:
    """Hashes of an invented prefix."""
    return tuple((seed * 1_000_003 + number) * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1 for number in range(1, blocks + 1))
