"""Waiting for a server's health, for whoever starts servers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap.rpc.clients import aio_channel

_RETRY_S = 0.05


async def wait_serving(address: str, timeout_s: float) -> None:
    """Return once the server at this address says SERVING. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s), aio_channel(address) as channel:
        check = _stub(channel).Check
        while True:
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_RETRY_S)


def _stub(channel: grpc.aio.Channel) -> Any:
    # The health package's stub carries no types.
    return health_pb2_grpc.HealthStub(channel)
