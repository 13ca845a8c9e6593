"""`Rebalancer` on the wire: messages in and out, nothing else."""

from __future__ import annotations

import grpc.aio

from dualmap.core.errors import NotFound
from dualmap.rpc.convert_rebalance import plan_message, status_message
from dualmap.rpc.server import AioServer
from dualmap.v1 import rebalancer_pb2, rebalancer_pb2_grpc
from services.rebalancer.rounds import Rounds


def register(server: AioServer, servicer: RebalancerServicer) -> None:
    """Serve it; before the server starts."""
    server.add(rebalancer_pb2_grpc.add_RebalancerServicer_to_server, servicer)


class RebalancerServicer(rebalancer_pb2_grpc.RebalancerServicer):
    """Serves one pool; an empty pool name means that one."""

    def __init__(self, pool: str, rounds: Rounds) -> None:
        self._pool = pool
        self._rounds = rounds

    async def GetStatus(
        self,
        request: rebalancer_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[rebalancer_pb2.GetStatusRequest, rebalancer_pb2.GetStatusResponse],  # noqa: ARG002
    ) -> rebalancer_pb2.GetStatusResponse:
        """How it does."""
        self._check_pool(request.pool)
        return status_message(self._rounds.status())

    async def PlanOnce(
        self,
        request: rebalancer_pb2.PlanOnceRequest,
        context: grpc.aio.ServicerContext[rebalancer_pb2.PlanOnceRequest, rebalancer_pb2.PlanOnceResponse],  # noqa: ARG002
    ) -> rebalancer_pb2.PlanOnceResponse:
        """Plan and send nothing."""
        self._check_pool(request.pool)
        plan = await self._rounds.plan_once()
        return plan_message(plan.ring_epoch, plan.moves, sorted(plan.lists), plan.plan_ms)

    def _check_pool(self, pool: str) -> None:
        if pool not in ("", self._pool):
            raise NotFound("pool", pool)
