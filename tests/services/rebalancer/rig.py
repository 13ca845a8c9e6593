"""A rebalancer between a real Redis and agents written by hand, all over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot
from dualmap.core.state import EMPTY_WAITING, KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_prompt import block_hashes_of
from dualmap.runtime.settings import MetricsSettings, RedisSettings, ServerSettings
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from dualmap.v1 import agent_pb2, agent_pb2_grpc, rebalancer_pb2, rebalancer_pb2_grpc
from services.rebalancer.app import App
from services.rebalancer.settings import RoundSettings, Settings

POOL = "default"
TIMEOUT_S = 5.0
TOKEN = b"list-1"


def item(
    request_id: str, candidates: tuple[str, ...], deadline_ms: float = 2_000, **fields: float
) -> agent_pb2.QueueItem:
    prompt_tokens = 5_120
    chain = Chain(ChainKind.TOKENS, [hash((request_id, n)) & (1 << 63) - 1 for n in range(40)], 128, prompt_tokens)
    return agent_pb2.QueueItem(
        request_id=request_id,
        attempt=1,
        deadline_ms=deadline_ms,
        prompt_tokens=prompt_tokens,
        miss_tokens=prompt_tokens,
        blocks=block_hashes_of(chain),
        candidate_instance_ids=candidates,
        key=chain.hashes[0],
        moved_ago_ms=fields.get("moved_ago_ms", -1),
    )


@dataclass
class FakeAgent(agent_pb2_grpc.InstanceAgentServicer):
    """Lists what it is told and says MOVED to all that still waits here."""

    name: str
    items: list[agent_pb2.QueueItem] = field(default_factory=list)
    rest_s: float = 0.0
    stalled_ms: float = 0.0
    outcome: rebalancer_pb2.MoveOutcome.ValueType = rebalancer_pb2.MOVE_OUTCOME_MOVED
    keeps: bool = False
    hangs: bool = False
    migrate_hangs: bool = False
    lists: int = 0
    batches: list[agent_pb2.MigrateRequest] = field(default_factory=list)
    port: int = 0

    async def ListQueue(
        self,
        request: agent_pb2.ListQueueRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ListQueueRequest, agent_pb2.ListQueueResponse],
    ) -> agent_pb2.ListQueueResponse:
        self.lists += 1
        assert request.instance_id == self.name
        if self.hangs:
            await asyncio.Event().wait()
        return agent_pb2.ListQueueResponse(
            list_token=TOKEN,
            items=self.items,
            waiting_requests=len(self.items),
            rest_s=self.rest_s,
            stalled_ms=self.stalled_ms,
        )

    async def Migrate(
        self,
        request: agent_pb2.MigrateRequest,
        context: grpc.aio.ServicerContext[agent_pb2.MigrateRequest, agent_pb2.MigrateResponse],
    ) -> agent_pb2.MigrateResponse:
        self.batches.append(request)
        if self.migrate_hangs:
            await asyncio.Event().wait()
        asked = {move.request_id for move in request.items}
        if not self.keeps:
            self.items = [waiting for waiting in self.items if waiting.request_id not in asked]
        results = [agent_pb2.MigrateItemResult(request_id=name, outcome=self.outcome) for name in sorted(asked)]
        return agent_pb2.MigrateResponse(results=results)


BUSY = LoadReport(waiting_s=(0.0,) * 10 + (9.0,) + (0.0,) * 13, waiting_requests=12, rest_s=1.0)
"""Nine seconds due within a second: somebody misses."""
CALM = LoadReport(waiting_s=EMPTY_WAITING)


def load(kind: LoadReport, **changes: object) -> LoadReport:
    values = {name: getattr(kind, name) for name in LoadReport.__dataclass_fields__}
    return LoadReport(**{**values, **changes})


class Cluster:
    """The pool in Redis, and its agents."""

    def __init__(self, redis_url: str) -> None:
        self.client = connect(redis_url)
        self.agents: dict[str, FakeAgent] = {}
        self.states: dict[str, InstanceState] = {}
        self._ring = RingStore(self.client, POOL)
        self._state = StateStore(self.client, POOL)
        self._versions: dict[str, int] = {}
        self._epoch = 0

    async def publish(self) -> None:
        self._epoch += 1
        members = tuple(
            Member(name, f"127.0.0.1:{agent.port}", state=self.states[name], agent_epoch=1)
            for name, agent in sorted(self.agents.items())
        )
        outcome = await self._ring.publish(RingSnapshot(POOL, self._epoch, RingParameters(), members), 1)
        assert outcome.published

    async def report(self, name: str, report: LoadReport) -> None:
        version = self._versions[name] = self._versions.get(name, 0) + 1
        assert await self._state.write(StateUpdate(name, 1, 1, version, 0, load=report, snapshot=KvSnapshot()))


@asynccontextmanager
async def cluster(redis_url: str, loads: dict[str, LoadReport]) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        made = Cluster(redis_url)
        stack.push_async_callback(made.client.aclose)
        for name, report in loads.items():
            agent = FakeAgent(name)  # type: ignore[abstract]  # the rest is never called
            server = grpc.aio.server()
            agent_pb2_grpc.add_InstanceAgentServicer_to_server(agent, server)
            agent.port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            made.agents[name] = agent
            made.states[name] = InstanceState.ACTIVE
            await made.report(name, report)
        await made.publish()
        yield made


@asynccontextmanager
async def rebalancer(
    redis_url: str, rounds: RoundSettings | None = None
) -> AsyncIterator[tuple[App, rebalancer_pb2_grpc.RebalancerAsyncStub]]:
    settings = Settings(
        redis=RedisSettings(url=redis_url),
        server=ServerSettings(drain_grace_s=0.5),
        metrics=MetricsSettings(port=None),
        rebalance=rounds or RoundSettings(period_ms=20),
        leader_lease_s=1.0,
    )
    async with App(settings) as app:
        channel = aio_channel(f"127.0.0.1:{app.port}")
        try:
            yield app, rebalancer_pb2_grpc.RebalancerStub(channel)
        finally:
            await channel.close()


async def status(stub: rebalancer_pb2_grpc.RebalancerAsyncStub) -> rebalancer_pb2.GetStatusResponse:
    return await stub.GetStatus(rebalancer_pb2.GetStatusRequest(pool=POOL), timeout=TIMEOUT_S)


async def wait_status(
    stub: rebalancer_pb2_grpc.RebalancerAsyncStub, condition: Callable[[rebalancer_pb2.GetStatusResponse], bool]
) -> rebalancer_pb2.GetStatusResponse:
    async with asyncio.timeout(10):
        while not condition(found := await status(stub)):
            await asyncio.sleep(0.01)
    return found
