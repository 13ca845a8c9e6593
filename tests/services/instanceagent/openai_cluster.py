"""Agents with an OpenAI port behind a router by hand, and the official client before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import openai
from grpc_status import rpc_status

from dualmap.core.errors import DualMapError
from dualmap.rpc.status import status_of
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.services.instanceagent.cluster import Cluster, cluster
from tests.services.instanceagent.fake_ring import FakeRing

Place = Callable[[router_pb2.RouteRequest], "tuple[str, str | None] | DualMapError"]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class PlacingRouter(router_pb2_grpc.RouterServicer):
    """A router that says what the test wants; while ``answers`` is clear it says nothing."""

    place: Place
    ring: FakeRing | None = None
    asked: list[router_pb2.RouteRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    traceparent: str = ""
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    server: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.answers.set()
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        router_pb2_grpc.add_RouterServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0)

    def response(self, request: router_pb2.RouteRequest, chosen: str, backup: str | None) -> router_pb2.RouteResponse:
        assert self.ring is not None
        member = self.ring.members[chosen]
        response = router_pb2.RouteResponse(
            request_id=request.request_id,
            attempt=request.attempt,
            instance=types_pb2.InstanceAddress(instance_id=chosen, grpc_address=member.grpc_address),
            reason=types_pb2.REASON_CACHE_HIT,
        )
        ticket = response.ticket
        ticket.router_id, ticket.instance_id, ticket.agent_epoch = 7, chosen, member.agent_epoch
        ticket.sequence, ticket.attempt, ticket.reason = len(self.asked), request.attempt, types_pb2.REASON_CACHE_HIT
        ticket.parameters_digest = self.ring.parameters.digest()
        ticket.traceparent = self.traceparent
        ticket.chosen.instance_id = chosen
        if backup is not None:
            address = self.ring.members[backup].grpc_address
            response.backup.CopyFrom(types_pb2.InstanceAddress(instance_id=backup, grpc_address=address))
            ticket.backup.instance_id = backup
        return response

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        await self.answers.wait()
        placed = self.place(request)
        if isinstance(placed, DualMapError):
            status = rpc_status.to_status(status_of(placed))
            await context.abort(status.code, status.details, status.trailing_metadata)
            return router_pb2.RouteResponse()
        return self.response(request, *placed)

    def _unused(self, *_: object) -> None:
        raise AssertionError("not called by a front door")

    RouteStream = Explain = GetView = Release = _unused  # type: ignore[assignment]


@dataclass
class OpenAiCluster:
    """Agents, their router, and a client for each."""

    built: Cluster
    router: PlacingRouter
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def url(self, name: str) -> str:
        port = self.built.agents[name].http
        assert port is not None
        return f"http://127.0.0.1:{port.port}"

    def client(self, name: str, **more: Any) -> openai.AsyncOpenAI:
        options = {"api_key": "a-secret", "max_retries": 0, **more}
        client = openai.AsyncOpenAI(base_url=f"{self.url(name)}/v1", **options)
        self.clients.append(client)
        return client

    def counted(self, name: str, counter: str) -> dict[str, float]:
        """A counter of an agent by reason."""
        found = {}
        for family in self.built.agents[name]._registry.collect():
            for sample in family.samples:
                if sample.name == f"dualmap_agent_{counter}_total":
                    found[sample.labels["reason"]] = sample.value
        return found


@asynccontextmanager
async def openai_cluster(
    *names: str,
    place: Place | None = None,
    agent: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    engines: Mapping[str, dict[str, Any]] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[OpenAiCluster]:
    """Agents of these names; every request is placed at the first of them unless ``place`` says otherwise."""
    router = PlacingRouter(place or (lambda _: (f"{names[0]}/0", None)))
    await router.start()
    built: OpenAiCluster | None = None
    try:
        # A busy machine must not turn a placed request into a DEGRADED one; the tests of that say 200 ms themselves.
        http = {"route_within_ms": 10_000, **(http or {})}
        settings = {"routers": router.address, **(agent or {})}
        async with cluster(
            *names, agent=settings, engine=engine, http=http, engines=engines, telemetry=telemetry
        ) as agents:
            router.ring = agents.ring
            built = OpenAiCluster(agents, router)
            yield built
    finally:
        for client in built.clients if built is not None else ():
            await client.close()
        await router.stop()


def chat(seed: int = 1, words: int = 300) -> list[Any]:
    """Messages of a chat of its own for each seed; a word is a token or two."""
    return [{"role": "user", "content": " ".join(f"w{seed}" for _ in range(words))}]
