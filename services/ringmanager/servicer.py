"""`RingManager` on the wire: messages in and out, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from dualmap.core.errors import NotFound
from dualmap.core.membership import RingSnapshot
from dualmap.rpc.convert_ring import heat_of, instance_id_of, join_of, renew_of, ring_to_message, state_to_message
from dualmap.rpc.server import AioServer
from dualmap.v1 import ring_pb2, ring_pb2_grpc
from services.ringmanager.keeper import RingKeeper


def register(server: AioServer, servicer: RingManagerServicer) -> None:
    """Serve it; before the server starts."""
    server.add(ring_pb2_grpc.add_RingManagerServicer_to_server, servicer)


class RingManagerServicer(ring_pb2_grpc.RingManagerServicer):
    """Serves one pool; an empty pool name means that one."""

    def __init__(self, pool: str, keeper: RingKeeper) -> None:
        self._pool = pool
        self._keeper = keeper
        self._last_sent: tuple[RingSnapshot, ring_pb2.WatchRingResponse] | None = None
        self._last_ring: ring_pb2.Ring | None = None

    async def Join(
        self,
        request: ring_pb2.JoinRequest,
        context: grpc.aio.ServicerContext[ring_pb2.JoinRequest, ring_pb2.JoinResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.JoinResponse:
        """Bring an instance in."""
        self._check_pool(request.pool)
        member = await self._keeper.join(join_of(request))
        return ring_pb2.JoinResponse(
            ring_epoch=self._keeper.epoch,
            ring=self._ring_message(self._keeper.ring()),
            lease_ms=self._keeper.lease_ms,
            state=state_to_message(member.state),
        )

    async def Renew(
        self,
        request: ring_pb2.RenewRequest,
        context: grpc.aio.ServicerContext[ring_pb2.RenewRequest, ring_pb2.RenewResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.RenewResponse:
        """Keep leases."""
        self._check_pool(request.pool)
        states = await self._keeper.renew(renew_of(request))
        return ring_pb2.RenewResponse(
            ring_epoch=self._keeper.epoch,
            states=[state_to_message(state) for state in states],
            lease_ms=self._keeper.lease_ms,
        )

    async def Drain(
        self,
        request: ring_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[ring_pb2.DrainRequest, ring_pb2.DrainResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.DrainResponse:
        """Stop new work for an instance."""
        self._check_pool(request.pool)
        member, share = await self._keeper.drain(instance_id_of(request.instance_id))
        return ring_pb2.DrainResponse(
            ring_epoch=self._keeper.epoch, state=state_to_message(member.state), moved_share=share
        )

    async def Undrain(
        self,
        request: ring_pb2.UndrainRequest,
        context: grpc.aio.ServicerContext[ring_pb2.UndrainRequest, ring_pb2.UndrainResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.UndrainResponse:
        """Take a drain back."""
        self._check_pool(request.pool)
        member = await self._keeper.undrain(instance_id_of(request.instance_id))
        return ring_pb2.UndrainResponse(ring_epoch=self._keeper.epoch, state=state_to_message(member.state))

    async def Leave(
        self,
        request: ring_pb2.LeaveRequest,
        context: grpc.aio.ServicerContext[ring_pb2.LeaveRequest, ring_pb2.LeaveResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.LeaveResponse:
        """Take an instance off."""
        self._check_pool(request.pool)
        share = await self._keeper.leave(instance_id_of(request.instance_id), request.agent_epoch)
        return ring_pb2.LeaveResponse(ring_epoch=self._keeper.epoch, moved_share=share)

    async def GetRing(
        self,
        request: ring_pb2.GetRingRequest,
        context: grpc.aio.ServicerContext[ring_pb2.GetRingRequest, ring_pb2.GetRingResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.GetRingResponse:
        """The ring known here."""
        self._check_pool(request.pool)
        now = self._keeper.get_ring()
        return ring_pb2.GetRingResponse(
            ring_epoch=now.ring.epoch,
            ring=self._ring_message(now.ring),
            leader=now.leader,
            last_moved_share=now.last_moved_share,
        )

    async def WatchRing(
        self,
        request: ring_pb2.WatchRingRequest,
        context: grpc.aio.ServicerContext[ring_pb2.WatchRingRequest, ring_pb2.WatchRingResponse],  # noqa: ARG002  (the contract's)
    ) -> AsyncIterator[ring_pb2.WatchRingResponse]:
        """The ring, then each change."""
        self._check_pool(request.pool)
        async for ring in self._keeper.watch(request.known_epoch):
            yield self._watch_message(ring) if ring else ring_pb2.WatchRingResponse(ring_epoch=self._keeper.epoch)

    async def ReportHeat(
        self,
        request: ring_pb2.ReportHeatRequest,
        context: grpc.aio.ServicerContext[ring_pb2.ReportHeatRequest, ring_pb2.ReportHeatResponse],  # noqa: ARG002  (the contract's)
    ) -> ring_pb2.ReportHeatResponse:
        """Count a router's samples."""
        self._check_pool(request.pool)
        want_splits = await self._keeper.report_heat(heat_of(request))
        return ring_pb2.ReportHeatResponse(ring_epoch=self._keeper.epoch, want_splits=want_splits)

    def _watch_message(self, ring: RingSnapshot) -> ring_pb2.WatchRingResponse:
        """All watchers are sent one snapshot: it is converted once."""
        if self._last_sent is None or self._last_sent[0] is not ring:
            self._last_sent = (ring, ring_pb2.WatchRingResponse(ring_epoch=ring.epoch, ring=self._ring_message(ring)))
        return self._last_sent[1]

    def _ring_message(self, ring: RingSnapshot) -> ring_pb2.Ring:
        """A thousand that join or watch at once get one ring: it is converted once, but for what grace is left of it.

        To be copied into an answer at once: the next caller's grace period is written over it.
        """
        if self._last_ring is None or self._last_ring.epoch != ring.epoch:
            self._last_ring = ring_to_message(ring)
        elif ring.previous is None:
            self._last_ring.ClearField("previous")
        elif self._last_ring.HasField("previous"):
            self._last_ring.previous.grace_left_ms = ring.previous.grace_left_ms
        return self._last_ring

    def _check_pool(self, pool: str) -> None:
        if pool not in ("", self._pool):
            raise NotFound("pool", pool)
