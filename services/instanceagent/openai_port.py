"""Puts the OpenAI port of an agent together: routers, prompts, front door, HTTP. Only `app` calls it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from uuid import uuid4

from dualmap.client.routers import Routers
from dualmap.runtime.clock import Clock
from dualmap.runtime.metrics import count_by_reason
from services.instanceagent.agent import Agent
from services.instanceagent.front_door import DoorParts, FrontDoor
from services.instanceagent.handover import Handovers
from services.instanceagent.http_port import HttpOptions, HttpParts, HttpPort
from services.instanceagent.metrics import AgentMetrics
from services.instanceagent.openai_call import ModelNames
from services.instanceagent.prompts import Prompts
from services.instanceagent.settings import Settings


@dataclass(frozen=True, slots=True)
class OpenAiParts:
    """What the port stands before, and where its numbers go."""

    agent: Agent
    handovers: Handovers
    metrics: AgentMetrics
    clock: Clock


async def serve_openai(stack: AsyncExitStack, settings: Settings, given: OpenAiParts) -> HttpPort | None:
    """Serve it until the stack closes; None where settings want none. Raises StartError."""
    if settings.http.port is None:
        return None
    agent, metrics, clock = given.agent, given.metrics, given.clock
    pool = metrics.pool
    names = ModelNames(settings.pool.models, settings.http.loras)
    route_within_s = settings.http.route_within_ms / 1_000
    routers = None
    if settings.agent.routers:
        # One that hangs leaves time for another, where there is another.
        tries = min(2, len(settings.agent.routers))
        routers = Routers(settings.agent.routers, route_within_s / tries)
        stack.push_async_callback(routers.close)
    engines = [instance.engine for instance in agent.instances.values()]
    prompts = Prompts(engines, lambda reason: metrics.byte_prompts.labels(pool=pool, reason=reason).inc())
    door_parts = DoorParts(
        routers,
        prompts,
        names,
        clock,
        count=count_by_reason(metrics.front_door, pool),
        route_within_s=route_within_s,
    )
    door = FrontDoor(agent, given.handovers, door_parts)
    options = HttpOptions(
        host=settings.http_host,
        port=settings.http.port,
        max_body_bytes=settings.http.max_body_bytes,
        body_within_s=settings.http.body_timeout_s,
        max_requests=settings.http.max_requests,
        stop_grace_s=settings.server.drain_grace_s,
    )
    parts = HttpParts(
        agent=agent,
        door=door,
        names=names,
        clock=clock,
        new_id=lambda: f"http-{uuid4().hex}",
        count=count_by_reason(metrics.http_answers, pool),
    )
    return await stack.enter_async_context(HttpPort(options, parts))
