"""Builds, starts, drains and stops an agent: the only place that joins clock, engines, loops and server."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from dualmap.core.binding import BindingOptions
from dualmap.core.errors import Unavailable
from dualmap.core.membership import Member, RingSnapshot
from dualmap.rpc.agent_calls import AgentCalls
from dualmap.rpc.interceptors import RpcMetrics
from dualmap.rpc.ring_calls import RingCalls
from dualmap.rpc.server import AioServer, ServerParts
from dualmap.runtime.background import running
from dualmap.runtime.clock import SystemClock
from dualmap.runtime.garbage import CalmCollector
from dualmap.runtime.health import Component, Health
from dualmap.runtime.logs import get_log
from dualmap.runtime.metrics import Exposition, new_registry
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from dualmap.runtime.telemetry import Telemetry, start_telemetry
from services.instanceagent.agent import Agent, AgentFacts
from services.instanceagent.candidates import Candidates
from services.instanceagent.drain import Drainer
from services.instanceagent.engines import EngineMaker
from services.instanceagent.handover import Handovers
from services.instanceagent.http_port import HttpPort
from services.instanceagent.identities import Identities
from services.instanceagent.instance import Instance
from services.instanceagent.instance_values import InstanceParts
from services.instanceagent.late_binding import OfferBook, Valuation
from services.instanceagent.membership import Membership
from services.instanceagent.metrics import AgentMetrics
from services.instanceagent.offer_sender import OfferSender
from services.instanceagent.openai_port import OpenAiParts, serve_openai
from services.instanceagent.planning import Planning
from services.instanceagent.puller import Puller
from services.instanceagent.request import HeldRequest
from services.instanceagent.ring_follower import RingFollower
from services.instanceagent.ring_managers import RingManagers
from services.instanceagent.servicer import InstanceAgentServicer, register
from services.instanceagent.settings import Settings
from services.instanceagent.state_log import StateLog

DRAIN_S, OFFERS_S, HEALTH_S, EMPTY_CHECK_S = 0.1, 0.05, 0.25, 0.05
STOPPED_RETRY_MS = 100
CALM_REQUESTS = 256

_log = get_log("instanceagent")


class App:
    """One agent; ``async with App(settings)`` serves until the block is left. `drain` before that loses nothing."""

    def __init__(self, settings: Settings, telemetry: Telemetry | None = None) -> None:
        self.settings = settings
        self.port = 0
        self.http: HttpPort | None = None
        self.metrics_port: int | None = None
        self.health = Health()
        self._telemetry = telemetry
        self._registry = new_registry()
        self._clock = SystemClock()
        self._maker = EngineMaker(settings, self._registry, self._clock)
        self.engines = self._maker.simulated
        self._identities = Identities()
        self._stack = AsyncExitStack()
        self._last_incarnation = 0
        self._request_ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Telemetry, engines, calls, server, loops, in this order."""
        async with AsyncExitStack() as stack:
            await self._build(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """The reverse."""
        await self._stack.aclose()

    async def _build(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        telemetry = self._telemetry or start_telemetry("instanceagent")
        if self._telemetry is None:
            stack.callback(telemetry.shutdown)
        if settings.metrics.port is not None:
            exposition = Exposition(self._registry, settings.metrics_host, settings.metrics.port, self.health)
            stack.callback(exposition.stop)
            self.metrics_port = exposition.port
        metrics = AgentMetrics(self._registry, settings.pool.name)
        facts = self._facts()
        instances = {name: await self._instance(stack, name, facts, metrics) for name in settings.agent.instance_ids}
        self.agent = Agent(facts, instances, self._identities, telemetry.tracer("dualmap.instanceagent"))
        self._maker.parameters = lambda: self.agent.defaults.parameters
        calls = await stack.enter_async_context(AgentCalls(telemetry))
        candidates = Candidates(lambda: self.agent.ring)
        self.handovers = Handovers(instances, candidates, calls)
        stack.push_async_callback(self.handovers.stop)
        if facts.late_binding:
            for instance in instances.values():
                self._bind_late(stack, instance, candidates, calls)
        server = AioServer(settings.server, ServerParts(self.health, RpcMetrics(self._registry), telemetry))
        servicer = InstanceAgentServicer(self.agent, Planning(self.agent, candidates, self.handovers))
        register(server, servicer)
        self.port = await server.start()
        stack.push_async_callback(server.stop)
        stack.callback(servicer.end_polls)
        self.http = await serve_openai(stack, settings, OpenAiParts(self.agent, self.handovers, metrics, self._clock))
        await self._join(stack, telemetry, metrics, calls)
        await self._start_loops(stack, candidates, calls)

    def _facts(self) -> AgentFacts:
        pool = self.settings.pool
        return AgentFacts(
            agent_epoch=time.time_ns() // 1_000_000,
            models=pool.models,
            ttft_slo_ms=pool.ttft_slo_ms,
            hash_key=pool.hash_key.get_secret_value().encode(),
            late_binding=self.settings.agent.binding == "late",
        )

    async def _instance(
        self, stack: AsyncExitStack, instance_id: str, facts: AgentFacts, metrics: AgentMetrics
    ) -> Instance:
        engine = self._maker.make(instance_id)
        parts = InstanceParts(
            state=StateLog(instance_id, facts.agent_epoch, self._new_incarnation()),
            metrics=metrics.of(instance_id),
            clock=self._clock,
            new_incarnation=self._new_incarnation,
            done=self._done,
        )
        settings = self.settings.engine
        options = replace(
            self.settings.agent.instance_options,
            host_discount=1 - settings.host_credit,
            remote_discount=1 - settings.remote_credit,
        )
        instance = Instance(options, engine, parts, facts.ttft_slo_ms)
        await instance.start()
        stack.push_async_callback(engine.stop)
        return instance

    def _bind_late(self, stack: AsyncExitStack, instance: Instance, candidates: Candidates, calls: AgentCalls) -> None:
        puller = Puller(instance, candidates, calls)
        stack.push_async_callback(puller.stop)
        valuation = Valuation(instance.miss_of, instance.prefill_s, instance.charge)
        instance.offers = OfferBook(valuation, puller.pull, BindingOptions())

    def _new_incarnation(self) -> int:
        self._last_incarnation = max(self._last_incarnation + 1, time.time_ns() // 1_000_000)
        return self._last_incarnation

    def _done(self, request: HeldRequest, ended: bool) -> None:
        self._identities.release(request, ended=ended, now_ms=self._clock.now_s() * 1_000)
        self._request_ended.set()

    async def _join(
        self, stack: AsyncExitStack, telemetry: Telemetry, metrics: AgentMetrics, calls: AgentCalls
    ) -> None:
        settings = self.settings
        pool = settings.pool.name
        managers = [
            await stack.enter_async_context(RingCalls(address, pool, telemetry))
            for address in settings.agent.ring_managers
        ]
        ring_failures = metrics.ring_failures.labels(pool=pool)
        ring_epoch = metrics.ring_epoch.labels(pool=pool)
        ring_managers = RingManagers(managers, ring_failures.inc)

        def adopted(ring: RingSnapshot) -> None:
            self.agent.adopt(ring)
            ring_epoch.set(ring.epoch)
            calls.forget(frozenset(member.grpc_address for member in ring.members))
            for member in ring.members:
                instance = self.agent.instances.get(member.instance_id)
                if instance is not None and member.agent_epoch == self.agent.facts.agent_epoch:
                    self.membership.told(instance, member.state)

        follower = RingFollower(ring_managers, adopted, self.health.component("ring", gates=False), self._clock)
        component = self.health.component("membership", gates=False)
        self.membership = Membership(self.agent, self._member(), ring_managers, follower, component)
        self.membership.drain_timeout_s = settings.agent.drain_timeout_s
        self._follower = follower

    def _member(self) -> Member:
        settings = self.settings
        host = settings.agent.advertise_host or settings.server.reachable_host
        http_address = _address(host, self.http.port) if self.http is not None else ""
        return Member(
            instance_id="",
            grpc_address=_address(host, self.port),
            http_address=settings.agent.http_address or http_address,
            weight=settings.agent.weight,
            agent_epoch=self.agent.facts.agent_epoch,
            model=settings.pool.models[0],
            role=settings.agent.role,
        )

    async def _start_loops(self, stack: AsyncExitStack, candidates: Candidates, calls: AgentCalls) -> None:
        vital = self.health.component("loops", gates=False, vital=True)
        engine = self.health.component("engine")
        loops = PeriodicMetrics(self._registry)
        for instance in self.agent.instances.values():
            await stack.enter_async_context(running(f"feed {instance.instance_id}", instance.run, vital))
            drainer = Drainer(instance, candidates, self.handovers)
            drain = Periodic(f"drain {instance.instance_id}", drainer.turn, Schedule(DRAIN_S), loops)
            await stack.enter_async_context(running(drain.name, drain.run, vital))
            if instance.offers is not None:
                sender = OfferSender(instance, candidates, calls)
                offers = Periodic(f"offers {instance.instance_id}", sender.turn, Schedule(OFFERS_S), loops)
                await stack.enter_async_context(running(offers.name, offers.run, vital))

        async def show_health() -> None:
            _show(engine, list(self.agent.instances.values()))

        health = Periodic("health", show_health, Schedule(HEALTH_S), loops)
        await stack.enter_async_context(running("health", health.run, vital))
        await stack.enter_async_context(running("ring", self._follower.run, vital))
        await stack.enter_async_context(running("membership", self._run_membership, vital))

    async def _run_membership(self, stop: asyncio.Event) -> None:
        await self.membership.run(stop, self._clock)

    def calm(self) -> bool:
        """Whether so little is held that a collection is short."""
        return self._identities.held <= CALM_REQUESTS

    async def drain(self) -> None:
        """Stop admitting, hand over what waits, let the rest finish, leave the ring; bounded by drain_timeout_s."""
        _log.info("drain_begun")
        until_s = self._clock.now_s() + self.settings.agent.drain_timeout_s
        await self.membership.drain_all()
        while self._clock.now_s() < until_s and not all(i.empty for i in self.agent.instances.values()):
            self._request_ended.clear()
            await self._clock.wait(self._request_ended, EMPTY_CHECK_S)
        cut = self.agent.end_all(Unavailable("this agent stops and", STOPPED_RETRY_MS))
        await self.membership.leave_all()
        _log.info("drain_over", cut=cut)


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``, then drain; one JSON line on stdout says where. A stop ends the wait for an engine too."""
    _log.info("settings", **settings.printable())
    async with AsyncExitStack() as stack:
        app = await _started(stack, App(settings), stop)
        if app is None:
            return
        calm = CalmCollector(app.calm)
        vital = app.health.component("garbage", gates=False, vital=True)
        await stack.enter_async_context(running("garbage", calm.run, vital))
        with _faults(app):
            http_port = app.http.port if app.http is not None else None
            line = {"event": "serving", "port": app.port, "metrics_port": app.metrics_port, "http_port": http_port}
            print(json.dumps(line), flush=True)  # noqa: T201  (parents find the ports by it)
            await stop.wait()
            await app.drain()


async def _started(stack: AsyncExitStack, app: App, stop: asyncio.Event) -> App | None:
    """The app, entered; None when ``stop`` came first."""
    starting = asyncio.ensure_future(stack.enter_async_context(app))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        _log.info("start_given_up")
        return None
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


@contextmanager
def _faults(app: App) -> Iterator[None]:
    """SIGUSR1 pauses the engines, SIGUSR2 resumes them, where settings allow it."""
    if not app.settings.engine.faults:
        yield
        return
    loop = asyncio.get_running_loop()

    def each(method: str) -> None:
        for engine in app.engines:
            getattr(engine, method)()

    loop.add_signal_handler(signal.SIGUSR1, each, "pause")
    loop.add_signal_handler(signal.SIGUSR2, each, "resume")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR2)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _show(engine: Component, instances: list[Instance]) -> None:
    for instance in instances:
        problem = instance.engine.problem
        if problem is not None or instance.suspect:
            engine.fail(f"{instance.instance_id}: {problem or 'makes no progress'}")
            return
    engine.ok()
