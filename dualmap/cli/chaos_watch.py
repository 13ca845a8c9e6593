"""Looks at a cluster from outside while it is hurt: does each router see everything, who leads, how fast is Route."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from dualmap.cli.local_cluster import LocalCluster
from dualmap.client import CallFailed, Prompt, Request
from dualmap.core.membership import InstanceState
from dualmap.rpc.convert_explain import ViewFacts
from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.operator_calls import RebalancerOperatorCalls, RingOperatorCalls, RouterOperatorCalls
from dualmap.rpc.ring_calls import RingCallError
from dualmap.rpc.route_calls import RouterCalls
from dualmap.rpc.state_calls import StateCallError, StateCalls

CALL_TIMEOUT_S = 0.5
FRESH_MS = 1_600.0
"""An idle agent holds a poll for a second; what is older than this is not polled."""

PROBE_S = 0.05
PROBE_TOKENS = 300

_Life = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Probe:
    """One Route call at one router: when it was sent (monotonic seconds), how long it took; None: it failed.

    ``release_s``: the call right after it, which does next to nothing: what the machine itself takes just then.
    """

    router: str
    at_s: float
    took_s: float | None
    release_s: float | None = None


class Watch:
    """Every question has its own bound; a part that does not answer is "not yet"."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.probes: list[Probe] = []
        self._cluster = cluster
        self._stack = AsyncExitStack()
        self._states = StateCalls()
        self._routers: dict[str, RouterOperatorCalls] = {}
        self._rings: dict[str, RingOperatorCalls] = {}
        self._rebalancers: dict[str, RebalancerOperatorCalls] = {}

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await enter(self._states)
        # Parts come back at the address they had, so a channel lives as long as the cluster.
        for name, service in self._cluster.services.items():
            match name.rsplit("-", 1)[0]:
                case "router":
                    self._routers[name] = await enter(RouterOperatorCalls(service.address))
                case "ringmanager":
                    self._rings[name] = await enter(RingOperatorCalls(service.address))
                case "rebalancer":
                    self._rebalancers[name] = await enter(RebalancerOperatorCalls(service.address))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def leader(self, role: str) -> str | None:
        """Name of the leading ring manager or rebalancer; None while none says so."""
        if role == "ringmanager":
            for name, ring in self._rings.items():
                try:
                    if (await ring.ring(CALL_TIMEOUT_S)).leader:
                        return name
                except CallFailed:
                    continue
        else:
            for name, rebalancer in self._rebalancers.items():
                try:
                    if (await rebalancer.status(CALL_TIMEOUT_S)).leader:
                        return name
                except CallFailed:
                    continue
        return None

    async def sees_all(self, router: str) -> bool:
        """Whether the router knows every instance as ACTIVE, reachable and lately heard of."""
        view = await self._view(router)
        wanted = self._cluster.options.instances
        return (
            view is not None
            and not view.degraded
            and len(view.instances) == wanted
            and all(
                one.state == InstanceState.ACTIVE and one.reachable and 0 <= one.state_age_ms < FRESH_MS
                for one in view.instances
            )
        )

    async def all_see_all(self) -> bool:
        """Whether every router does."""
        return all([await self.sees_all(router) for router in self._routers])

    async def differing(self) -> list[str]:
        """What differs between agents' own indexes and the routers' views, in words; empty when nothing does.

        Comparable only while nothing is sent: a view is one poll behind.
        """
        own = await self._own_lives()
        if isinstance(own, str):
            return [own]
        found = []
        for router in self._routers:
            view = await self._view(router)
            if view is None:
                found.append(f"{router} does not answer")
                continue
            seen = {
                one.instance_id: (one.incarnation, one.agent_epoch, one.version, one.kv_digest)
                for one in view.instances
            }
            found += [
                f"{router} has {name} as {seen.get(name)}, it is {own.get(name)}"
                for name in sorted(own.keys() | seen.keys())
                if own.get(name) != seen.get(name)
            ]
        return found

    async def probe(self, router: str, stop: asyncio.Event, prefix: str) -> None:
        """Route once and again at one router, release at once, keep the times."""
        number = 0
        calls = RouterCalls(self._cluster.services[router].address)
        try:
            while not stop.is_set():
                number += 1
                request = Request(f"{prefix}-{router}-{number}", Prompt.of_tokens(range(number, number + PROBE_TOKENS)))
                self.probes.append(await _probed(calls, router, request))
                await asyncio.sleep(PROBE_S)
        finally:
            await calls.close()

    async def _view(self, router: str) -> ViewFacts | None:
        try:
            return await self._routers[router].view(CALL_TIMEOUT_S)
        except CallFailed:
            return None

    async def _own_lives(self) -> dict[str, _Life] | str:
        try:
            members = (await self._cluster.ring(CALL_TIMEOUT_S)).members
        except (RingCallError, TimeoutError, OSError) as error:
            return f"no ring: {error}"
        own: dict[str, _Life] = {}
        for member in members:
            query = StateQuery(member.instance_id, full=True)
            try:
                state = await self._states.get_state(member.grpc_address, query, CALL_TIMEOUT_S)
            except StateCallError as error:
                return f"{member.instance_id} does not answer: {error}"
            own[member.instance_id] = (state.incarnation, state.agent_epoch, state.version, state.kv_digest)
        if len(own) != self._cluster.options.instances:
            return f"{len(own)} instances on the ring, {self._cluster.options.instances} started"
        return own


async def _probed(calls: RouterCalls, router: str, request: Request) -> Probe:
    sent_s = time.monotonic()
    try:
        route = await calls.route(request, CALL_TIMEOUT_S)
        routed_s = time.monotonic()
        await calls.release(route.request_id, route.attempt, CALL_TIMEOUT_S)
    except CallFailed:
        return Probe(router, sent_s, None)
    return Probe(router, sent_s, routed_s - sent_s, time.monotonic() - routed_s)
