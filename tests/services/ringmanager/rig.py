"""Ring managers in this process, real gRPC in front and a real Redis behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.clients import aio_channel
from dualmap.runtime.settings import MetricsSettings, PoolSettings, RedisSettings, ServerSettings
from dualmap.store.connection import connect
from dualmap.store.state_store import StateStore
from dualmap.v1 import ring_pb2, ring_pb2_grpc, types_pb2
from services.ringmanager.app import App
from services.ringmanager.settings import HeatSettings, LeaseSettings, RingSettings, Settings

POOL = "default"
TIMEOUT_S = 5.0


def settings(
    redis_url: str,
    *,
    lease: LeaseSettings | None = None,
    ring: RingSettings | None = None,
    heat: HeatSettings | None = None,
    leader_lease_s: float = 1.0,
) -> Settings:
    return Settings(
        redis=RedisSettings(url=redis_url),
        server=ServerSettings(drain_grace_s=0.5),
        metrics=MetricsSettings(port=None),
        pool=PoolSettings(name=POOL),
        lease=lease or LeaseSettings(lease_s=1.0, turn_s=0.02),
        ring=ring or RingSettings(heartbeat_s=0.2),
        heat=heat or HeatSettings(),
        leader_lease_s=leader_lease_s,
    )


@asynccontextmanager
async def ring_manager(of: Settings) -> AsyncIterator[tuple[App, ring_pb2_grpc.RingManagerAsyncStub]]:
    async with App(of) as app:
        channel = aio_channel(f"127.0.0.1:{app.port}")
        try:
            yield app, ring_pb2_grpc.RingManagerStub(channel)
        finally:
            await channel.close()


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def join_request(name: str, agent_epoch: int = 1, **fields: Any) -> ring_pb2.JoinRequest:
    address = types_pb2.InstanceAddress(instance_id=name, grpc_address="127.0.0.1:9", http_address="127.0.0.1:8")
    return ring_pb2.JoinRequest(pool=POOL, address=address, agent_epoch=agent_epoch, model="m", **fields)


async def store_state(redis_url: str, name: str, agent_epoch: int = 1) -> None:
    """What a collector does after its first good poll."""
    client = connect(redis_url)
    try:
        update = StateUpdate(name, 1, agent_epoch, 1, 0, load=LoadReport(), snapshot=KvSnapshot())
        assert await StateStore(client, POOL).write(update)
    finally:
        await client.aclose()


async def get_ring(stub: ring_pb2_grpc.RingManagerAsyncStub) -> ring_pb2.GetRingResponse:
    return await stub.GetRing(ring_pb2.GetRingRequest(pool=POOL), timeout=TIMEOUT_S)


async def wait_ring(
    stub: ring_pb2_grpc.RingManagerAsyncStub, condition: Callable[[ring_pb2.GetRingResponse], bool]
) -> ring_pb2.GetRingResponse:
    async with asyncio.timeout(10):
        while not condition(found := await get_ring(stub)):
            await asyncio.sleep(0.01)
    return found


def states(answer: ring_pb2.GetRingResponse) -> dict[str, str]:
    name = types_pb2.InstanceState.Name
    return {
        member.address.instance_id: name(member.state).removeprefix("INSTANCE_STATE_") for member in answer.ring.members
    }


class Renewals:
    """Renews some instances, thrice a lease, as their agents do."""

    def __init__(self, stub: ring_pb2_grpc.RingManagerAsyncStub, names: set[str], every_s: float = 0.1) -> None:
        self.names = names
        self.suspect: set[str] = set()
        self._stub = stub
        self._every_s = every_s

    async def run(self) -> None:
        while True:
            instances = [
                ring_pb2.RenewInstance(instance_id=name, suspect=name in self.suspect) for name in sorted(self.names)
            ]
            await self._stub.Renew(
                ring_pb2.RenewRequest(pool=POOL, instances=instances, agent_epoch=1), timeout=TIMEOUT_S
            )
            await asyncio.sleep(self._every_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Renewals]:
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})
