"""`StateCollector` on the wire: messages in and out, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from dualmap.core.errors import Unavailable
from dualmap.rpc.convert_state import instance_message, page_message, page_size_of, watch_message
from dualmap.rpc.server import AioServer
from dualmap.store.connection import StoreError
from dualmap.v1 import state_pb2, state_pb2_grpc
from services.statecollector.directory import Directory

_RETRY_MS = 500


def register(server: AioServer, servicer: StateCollectorServicer) -> None:
    """Serve it; before the server starts."""
    server.add(state_pb2_grpc.add_StateCollectorServicer_to_server, servicer)


class StateCollectorServicer(state_pb2_grpc.StateCollectorServicer):
    """Serves one pool."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def ListInstances(
        self,
        request: state_pb2.ListInstancesRequest,
        context: grpc.aio.ServicerContext[state_pb2.ListInstancesRequest, state_pb2.ListInstancesResponse],  # noqa: ARG002
    ) -> state_pb2.ListInstancesResponse:
        """A page."""
        self._directory.check_pool(request.pool)
        size = page_size_of(request)
        try:
            page = await self._directory.page(size, request.page_token)
        except StoreError as error:
            raise Unavailable("Redis", _RETRY_MS) from error
        return page_message(page.ring_epoch, page.instances, page.next_token)

    async def GetInstance(
        self,
        request: state_pb2.GetInstanceRequest,
        context: grpc.aio.ServicerContext[state_pb2.GetInstanceRequest, state_pb2.GetInstanceResponse],  # noqa: ARG002
    ) -> state_pb2.GetInstanceResponse:
        """One instance."""
        self._directory.check_pool(request.pool)
        try:
            facts = await self._directory.instance(request.instance_id)
        except StoreError as error:
            raise Unavailable("Redis", _RETRY_MS) from error
        return instance_message(self._directory.ring_epoch, facts)

    async def WatchState(
        self,
        request: state_pb2.WatchStateRequest,
        context: grpc.aio.ServicerContext[state_pb2.WatchStateRequest, state_pb2.WatchStateResponse],  # noqa: ARG002
    ) -> AsyncIterator[state_pb2.WatchStateResponse]:
        """All of it, then each change."""
        self._directory.check_pool(request.pool)
        try:
            async for change in self._directory.watch(request.instance_ids):
                yield watch_message(change.ring_epoch, change.changed, change.left, snapshot=change.snapshot)
        except StoreError as error:
            raise Unavailable("Redis", _RETRY_MS) from error
