"""Real agents in one process before a fake ring, a client that collects events, and a scripted other agent."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from dualmap.rpc.request_events import MoveOutcome
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import agent_pb2, agent_pb2_grpc, types_pb2
from services.instanceagent.app import App
from services.instanceagent.settings import Settings
from tests.services.instanceagent.fake_ring import FakeRing

OK = grpc.StatusCode.OK


async def until(condition: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
    """Wait for a condition, bounded."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s: {what}") from None


def settings(
    ring: str,
    name: str,
    agent: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
) -> Settings:
    """An agent's settings, with a quick engine."""
    return Settings.model_validate(
        {
            "server": {"port": 0, "drain_grace_s": 0.2},
            "metrics": {"port": None},
            "http": {"port": 0, **(http or {})},
            "agent": {"id": name, "ring_managers": ring, "drain_timeout_s": 10, **(agent or {})},
            "engine": {
                "prefill_ms": 2.0,
                "prefill_us_per_token": 20.0,
                "decode_tokens_per_s": 2_000.0,
                "output_tokens": 4,
                **(engine or {}),
            },
        }
    )


@dataclass
class Cluster:
    """A fake ring and agents by name."""

    ring: FakeRing
    agents: dict[str, App] = field(default_factory=dict)
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def stub(self, name: str) -> Any:
        return self.stub_at(f"127.0.0.1:{self.agents[name].port}")

    def stub_at(self, address: str) -> Any:
        channel = grpc.aio.insecure_channel(address)
        self.channels.append(channel)
        return agent_pb2_grpc.InstanceAgentStub(channel)

    def instance(self, name: str, rank: int = 0) -> Any:
        return self.agents[name].agent.instances[f"{name}/{rank}"]

    def pause(self, *names: str) -> None:
        for name in names:
            for instance in self.agents[name].agent.instances.values():
                instance.engine.pause()  # type: ignore[attr-defined]

    def resume(self, *names: str) -> None:
        for name in names:
            for instance in self.agents[name].agent.instances.values():
                instance.engine.resume()  # type: ignore[attr-defined]


@asynccontextmanager
async def cluster(
    *names: str,
    agent: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    engines: Mapping[str, dict[str, Any]] | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[Cluster]:
    """Agents of these names, joined and knowing each other; ``engines``: an engine each instead of ``engine``."""
    ring = FakeRing()
    await ring.start()
    built = Cluster(ring)
    try:
        for name in names:
            own = engines[name] if engines is not None else engine
            built.agents[name] = await App(settings(ring.address, name, agent, own, http), telemetry).__aenter__()
        await until(lambda: all(knows(built, name, names) for name in names), "all agents know each other")
        yield built
    finally:
        for channel in built.channels:
            await channel.close()
        for app in reversed(built.agents.values()):
            await app.__aexit__(None, None, None)
        await ring.stop()


def knows(built: Cluster, name: str, others: tuple[str, ...]) -> bool:
    ring = built.agents[name].agent.ring
    known = {member.instance_id.split("/")[0] for member in ring.members} if ring is not None else set()
    return set(others) <= known


def tokens(seed: int, count: int = 256) -> bytes:
    """A prompt of its own for each seed."""
    return struct.pack(f"<{count}I", *((seed * 100_003 + i) % 50_000 for i in range(count)))


def submission(request_id: str, seed: int = 1, count: int = 256, **changes: Any) -> agent_pb2.SubmitRequest:
    """A request with a prompt of ``count`` tokens."""
    prompt = types_pb2.Prompt(token_ids=tokens(seed, count))
    return agent_pb2.SubmitRequest(request_id=request_id, prompt=prompt, **changes)


class Following:
    """A call's events, collected by a task of their own."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages: list[Any] = []
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.task = asyncio.ensure_future(self._collect())

    async def _collect(self) -> None:
        try:
            async for message in self.call:
                self.messages.append(message)
            self.code = OK
        except grpc.aio.AioRpcError as error:
            self.code, self.details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            self.code = grpc.StatusCode.CANCELLED
            if not self.call.cancelled():
                raise

    async def end(self, within_s: float = 20.0) -> grpc.StatusCode | None:
        await asyncio.wait_for(asyncio.shield(self.task), within_s)
        return self.code

    @property
    def events(self) -> list[agent_pb2.RequestEvent]:
        return [m.event for m in self.messages if m.HasField("event")]

    @property
    def kinds(self) -> list[str]:
        kinds = [event.WhichOneof("event") or "" for event in self.events]
        return [kind for kind in kinds if kind != "pulse"]

    def first(self, kind: str) -> Any:
        for event in self.events:
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)
        raise AssertionError(f"no {kind} in {self.kinds}")


def submit(stub: Any, request: agent_pb2.SubmitRequest) -> Following:
    """Submit and follow."""
    return Following(stub.Submit(request))


def accept_request(
    request: agent_pb2.SubmitRequest, target: str, origin: str, **changes: Any
) -> agent_pb2.AcceptRequest:
    """A hand-over as an origin would send it."""
    fields = {
        "handover": 1,
        "deadline_left_ms": 5_000.0,
        "cause": agent_pb2.HANDOVER_CAUSE_MIGRATE,
        **changes,
    }
    return agent_pb2.AcceptRequest(request=request, target_instance_id=target, origin_instance_id=origin, **fields)


async def migrate(stub: Any, source: str, target: str, *request_ids: str, **changes: Any) -> list[str]:
    """List, then move; outcomes by name."""
    listed = await stub.ListQueue(agent_pb2.ListQueueRequest(instance_id=source), timeout=5)
    items = [agent_pb2.MigrateItem(request_id=r, attempt=1, target_instance_id=target) for r in request_ids]
    fields = {"list_token": listed.list_token, **changes}
    answer = await stub.Migrate(agent_pb2.MigrateRequest(instance_id=source, items=items, **fields), timeout=5)
    return [MoveOutcome(result.outcome).name for result in answer.results]


Script = Callable[[agent_pb2.AcceptRequest, Any], AsyncIterator[agent_pb2.AcceptResponse]]


class ScriptedAgent:
    """Another agent that does on Accept whatever the test wrote."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.accepted: list[agent_pb2.AcceptRequest] = []
        self.cancelled = asyncio.Event()

    async def accept(self, request: agent_pb2.AcceptRequest, context: Any) -> AsyncIterator[agent_pb2.AcceptResponse]:
        self.accepted.append(request)
        try:
            async for message in self.script(request, context):
                yield message
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def scripted(ring: FakeRing, instance_id: str, script: Script) -> AsyncIterator[ScriptedAgent]:
    """A scripted agent as a member of the ring."""
    servicer = ScriptedAgent(script)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    accept = grpc.unary_stream_rpc_method_handler(
        servicer.accept, agent_pb2.AcceptRequest.FromString, agent_pb2.AcceptResponse.SerializeToString
    )
    handlers = grpc.method_handlers_generic_handler("dualmap.v1.InstanceAgent", {"Accept": accept})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ring.set(instance_id, grpc_address=f"127.0.0.1:{port}")
    try:
        yield servicer
    finally:
        await server.stop(0)


def accepted() -> agent_pb2.AcceptResponse:
    return agent_pb2.AcceptResponse(accepted=agent_pb2.Accepted(agent_epoch=1))


def told(**event: Any) -> agent_pb2.AcceptResponse:
    return agent_pb2.AcceptResponse(event=agent_pb2.RequestEvent(**event))
