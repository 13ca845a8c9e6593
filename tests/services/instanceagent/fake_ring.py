"""A ring manager by hand: a real gRPC server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio

from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.rpc.convert_ring import join_of, ring_to_message
from dualmap.v1 import ring_pb2, ring_pb2_grpc, types_pb2


class FakeRing(ring_pb2_grpc.RingManagerServicer):
    def __init__(self, default_slo_ms: int = 5_000) -> None:
        self.members: dict[str, Member] = {}
        self.epoch = 1_000
        self.parameters = RingParameters()
        self.default_slo_ms = default_slo_ms
        self.renewed: list[ring_pb2.RenewRequest] = []
        self.left: list[str] = []
        self.drained: list[str] = []
        self.port = 0
        self.stuck_watches = False
        self.refused: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        ring_pb2_grpc.add_RingManagerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def snapshot(self) -> RingSnapshot:
        return RingSnapshot(
            "default", self.epoch, self.parameters, tuple(self.members.values()), (), self.default_slo_ms
        )

    def set(self, instance_id: str, **changes: Any) -> None:
        """Change a member, or add one with ``grpc_address`` given; a new epoch for all followers."""
        member = self.members.get(instance_id) or Member(instance_id, "", state=InstanceState.ACTIVE)
        self.members[instance_id] = replace(member, **changes)
        self._publish()

    def _publish(self) -> None:
        self.epoch += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def Join(self, request: ring_pb2.JoinRequest, context: Any) -> ring_pb2.JoinResponse:
        wish = join_of(request).wish
        if wish.instance_id in self.refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused")
        self.members[wish.instance_id] = replace(wish, state=InstanceState.ACTIVE)
        self.epoch = max(self.epoch, request.highest_epoch_seen)
        self._publish()
        return ring_pb2.JoinResponse(
            ring_epoch=self.epoch,
            ring=ring_to_message(self.snapshot()),
            lease_ms=600,
            state=types_pb2.INSTANCE_STATE_ACTIVE,
        )

    async def Renew(self, request: ring_pb2.RenewRequest, context: Any) -> ring_pb2.RenewResponse:
        self.renewed.append(request)
        states = [
            self.members[item.instance_id].state if item.instance_id in self.members else InstanceState.LEFT
            for item in request.instances
        ]
        numbers = [types_pb2.InstanceState.ValueType(int(state)) for state in states]
        return ring_pb2.RenewResponse(ring_epoch=self.epoch, states=numbers, lease_ms=600)

    async def Drain(self, request: ring_pb2.DrainRequest, context: Any) -> ring_pb2.DrainResponse:
        self.drained.append(request.instance_id)
        self.set(request.instance_id, state=InstanceState.DRAINING)
        return ring_pb2.DrainResponse(ring_epoch=self.epoch, state=types_pb2.INSTANCE_STATE_DRAINING)

    async def Leave(self, request: ring_pb2.LeaveRequest, context: Any) -> ring_pb2.LeaveResponse:
        self.left.append(request.instance_id)
        self.members.pop(request.instance_id, None)
        self._publish()
        return ring_pb2.LeaveResponse(ring_epoch=self.epoch)

    async def GetRing(self, request: ring_pb2.GetRingRequest, context: Any) -> ring_pb2.GetRingResponse:
        return ring_pb2.GetRingResponse(ring_epoch=self.epoch, ring=ring_to_message(self.snapshot()), leader=True)

    async def ReportHeat(self, request: ring_pb2.ReportHeatRequest, context: Any) -> ring_pb2.ReportHeatResponse:
        return ring_pb2.ReportHeatResponse(ring_epoch=self.epoch)

    async def Undrain(self, request: ring_pb2.UndrainRequest, context: Any) -> ring_pb2.UndrainResponse:
        self.set(request.instance_id, state=InstanceState.ACTIVE)
        return ring_pb2.UndrainResponse(ring_epoch=self.epoch, state=types_pb2.INSTANCE_STATE_ACTIVE)

    async def WatchRing(
        self, request: ring_pb2.WatchRingRequest, context: Any
    ) -> AsyncIterator[ring_pb2.WatchRingResponse]:
        known = request.known_epoch
        while True:
            changed = self._changed
            if self.epoch > known and not (self.stuck_watches and known > request.known_epoch):
                known = self.epoch
                yield ring_pb2.WatchRingResponse(ring_epoch=known, ring=ring_to_message(self.snapshot()))
            await changed.wait()
