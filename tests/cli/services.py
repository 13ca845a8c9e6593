"""Services of a small system, written by hand and served by threads, so that a command may run its own event loop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import grpc
from opentelemetry import trace
from prometheus_client import CollectorRegistry

from dualmap.core.errors import NotFound, NotLeader, UnknownInstance
from dualmap.core.membership import InstanceState, Member, PreviousRing, RingParameters, RingSnapshot, Split
from dualmap.core.rebalance import Cause, Move
from dualmap.core.state import LoadReport
from dualmap.rpc.convert_rebalance import PlannedMove, RebalancerStatus, status_message
from dualmap.rpc.convert_ring import ring_to_message, state_to_message
from dualmap.rpc.convert_state import InstanceFacts, page_message
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.request_events import MoveOutcome
from dualmap.rpc.server import ServerParts, SyncServer
from dualmap.runtime.health import Health
from dualmap.runtime.settings import ServerSettings
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import rebalancer_pb2, rebalancer_pb2_grpc, ring_pb2, ring_pb2_grpc, state_pb2, state_pb2_grpc

EPOCH = 1_700_000_000_005


def member(name: str, state: InstanceState = InstanceState.ACTIVE) -> Member:
    return Member(name, "127.0.0.1:7100", "127.0.0.1:8100", state, agent_epoch=1, model="m")


def ring(*members: Member, **fields: object) -> RingSnapshot:
    snapshot = RingSnapshot("default", EPOCH, RingParameters(), members, (Split(0xAB, 1, 4),))
    return replace(snapshot, **fields)  # type: ignore[arg-type]


def before(after: RingSnapshot, *members: Member) -> RingSnapshot:
    """The ring in its grace period, with what was before."""
    return replace(after, previous=PreviousRing(after.epoch - 1, members, after.splits, 9_000))


def facts(name: str, load: LoadReport, **fields: object) -> InstanceFacts:
    known = InstanceFacts(name, 1, 1, 7, 42, 0, load, reachable=True, polled_ago_ms=12.0, collector="c-1")
    return replace(known, **fields)  # type: ignore[arg-type]


def move(request_id: str, outcome: MoveOutcome | None = MoveOutcome.MOVED) -> PlannedMove:
    return PlannedMove(Move(request_id, 1, "agent-1/0", "agent-2/0", 1.25, Cause.OVERLOAD), outcome)


def status(*moves: PlannedMove, leader: bool = True) -> RebalancerStatus:
    return RebalancerStatus(EPOCH, leader, 3, 250, 40, 0, 5, 4, 0.2, moves, dry_run=False)


@dataclass
class FakeRingManager(ring_pb2_grpc.RingManagerServicer):
    """Holds one ring; a drain or its undoing changes the member's state."""

    ring: RingSnapshot
    leads: bool = True
    drained_goes: bool = False
    asked: list[str] = field(default_factory=list)

    def register(self, server: Any) -> None:
        ring_pb2_grpc.add_RingManagerServicer_to_server(self, server)

    def GetRing(self, request: ring_pb2.GetRingRequest, context: grpc.ServicerContext) -> ring_pb2.GetRingResponse:
        if request.pool not in ("", "default"):
            raise NotFound("pool", request.pool)
        if self.drained_goes:
            left = [one for one in self.ring.members if one.state is not InstanceState.DRAINING]
            self.ring = replace(self.ring, members=tuple(left))
        message = ring_to_message(self.ring)
        return ring_pb2.GetRingResponse(
            ring_epoch=self.ring.epoch, ring=message, leader=self.leads, last_moved_share=0.25
        )

    def Drain(self, request: ring_pb2.DrainRequest, context: grpc.ServicerContext) -> ring_pb2.DrainResponse:
        self._set(request.instance_id, InstanceState.DRAINING)
        return ring_pb2.DrainResponse(
            ring_epoch=self.ring.epoch, state=state_to_message(InstanceState.DRAINING), moved_share=0.5
        )

    def Undrain(self, request: ring_pb2.UndrainRequest, context: grpc.ServicerContext) -> ring_pb2.UndrainResponse:
        self._set(request.instance_id, InstanceState.ACTIVE)
        return ring_pb2.UndrainResponse(ring_epoch=self.ring.epoch, state=state_to_message(InstanceState.ACTIVE))

    def _set(self, name: str, state: InstanceState) -> None:
        self.asked.append(name)
        if not self.leads:
            raise NotLeader("10.0.0.1:7071")
        if name not in {one.instance_id for one in self.ring.members}:
            raise UnknownInstance(name)
        members = tuple(replace(one, state=state) if one.instance_id == name else one for one in self.ring.members)
        self.ring = replace(self.ring, epoch=self.ring.epoch + 1, members=members)


@dataclass
class FakeCollector(state_pb2_grpc.StateCollectorServicer):
    """Lists its instances, one a page."""

    instances: list[InstanceFacts]

    def register(self, server: Any) -> None:
        state_pb2_grpc.add_StateCollectorServicer_to_server(self, server)

    def ListInstances(
        self, request: state_pb2.ListInstancesRequest, context: grpc.ServicerContext
    ) -> state_pb2.ListInstancesResponse:
        start = int(request.page_token or 0)
        following = str(start + 1) if start + 1 < len(self.instances) else ""
        return page_message(EPOCH, self.instances[start : start + 1], following)


@dataclass
class FakeRebalancer(rebalancer_pb2_grpc.RebalancerServicer):
    """Has one status."""

    status: RebalancerStatus

    def register(self, server: Any) -> None:
        rebalancer_pb2_grpc.add_RebalancerServicer_to_server(self, server)

    def GetStatus(
        self, request: rebalancer_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> rebalancer_pb2.GetStatusResponse:
        return status_message(self.status)


def ring_manager(known: RingSnapshot, *, leads: bool = True, drained_goes: bool = False) -> FakeRingManager:
    return FakeRingManager(known, leads, drained_goes)  # type: ignore[abstract]  # the rest is never called


def collector(*instances: InstanceFacts) -> FakeCollector:
    return FakeCollector(list(instances))  # type: ignore[abstract]  # same


def rebalancer(known: RebalancerStatus) -> FakeRebalancer:
    return FakeRebalancer(known)  # type: ignore[abstract]  # same


class Registering(Protocol):
    def register(self, server: Any) -> None: ...


@contextmanager
def serving(servicer: Registering) -> Iterator[str]:
    """The address it is served at, with our own status table before it."""
    parts = ServerParts(Health(), RpcMetrics(CollectorRegistry()), Telemetry(trace.NoOpTracerProvider()))
    server = SyncServer(ServerSettings(drain_grace_s=0.5), parts, 2)
    server.add(lambda served, registrar: served.register(registrar), servicer)
    port = server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop()


@contextmanager
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"
