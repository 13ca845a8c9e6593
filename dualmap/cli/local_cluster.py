"""A whole cluster as processes of this machine, for `up`, `demo`, `replay` and the end-to-end tests.

Embedded Valkey (or the Redis of DUALMAP_REDIS_URL), ring manager, collectors, rebalancer, routers, agents with
simulated engines. Everything listens on loopback and ends with this process.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from dualmap.cli.embedded_valkey import EmbeddedValkey
from dualmap.cli.processes import RunningService, ServiceSpec, StartError, start_service
from dualmap.core.membership import InstanceState, RingSnapshot
from dualmap.core.state import PrefillCost
from dualmap.rpc.health_calls import wait_serving
from dualmap.rpc.ring_calls import RingCallError, RingCalls
from dualmap.runtime.lifetime import StartError as CannotStart
from dualmap.runtime.redis_start import require_redis
from dualmap.runtime.settings import ServiceSettings, redis_url_of
from dualmap.runtime.settings_loader import load_settings
from dualmap.store.connection import connect

MIN_PERIOD_MS = 20
"""Shortest poll and rebalance period: below it the processes of one machine only disturb each other."""

READY_TIMEOUT_S = 60.0

_QUIET_PORTS = (12_000, 30_000)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What to start. Costs and periods are given in trace time and divided by ``speed`` on the way in.

    ``restartable``: parts can be killed and come back: Valkey with its data, services at ports that nobody else takes.
    """

    instances: int = 4
    routers: int = 1
    ring_managers: int = 1
    collectors: int = 1
    rebalancers: int = 1
    speed: float = 1.0
    ttft_slo_ms: int = 5_000
    poll_ms: int = 100
    rebalance_ms: int = 250
    rebalance: bool = True
    start_depth: int = 2
    cost: PrefillCost = field(default_factory=PrefillCost)
    kv_tokens: int = 1_200_000
    decode_tokens_per_s: float = 40.0
    max_wait_s: float = 60.0
    queue_policy: str = "slo"
    binding: str = "early"
    engine_faults: bool = False
    restartable: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def period_ms(self, trace_ms: int) -> int:
        """A period of trace time as wall time, never below MIN_PERIOD_MS (or itself, if that is shorter)."""
        return max(min(MIN_PERIOD_MS, trace_ms), round(trace_ms / self.speed))


class LocalCluster:
    """Started by `async with`; every part can be found by its role, killed and started again."""

    def __init__(self, options: LocalOptions) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="dualmap-"))
        self.services: dict[str, RunningService] = {}
        self.valkey: EmbeddedValkey | None = None
        self.redis_url = redis_url_of(os.environ)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """host:port of each router."""
        return tuple(s.address for name, s in self.services.items() if name.startswith("router"))

    def role(self, role: str) -> list[str]:
        """Names of the running services of a role, for example "agent"."""
        return [name for name, s in self.services.items() if name.rsplit("-", 1)[0] == role and s.running]

    async def start(self, name: str) -> RunningService:
        """Start the service of this name, again at the ports it had: others know it by them. Raises StartError."""
        former = self.services.get(name)
        service = await start_service(self._spec(name, former))
        self.services[name] = service
        if former is not None:
            await former.stop(0.0)
        return service

    async def ring(self, timeout_s: float = 2.0) -> RingSnapshot:
        """The ring as the first ring manager that answers has it now. Raises RingCallError."""
        failure: RingCallError | None = None
        for name in self.role("ringmanager"):
            try:
                return await current_ring(self.services[name].address, self.pool, timeout_s)
            except RingCallError as error:
                failure = error
        if failure is None:
            raise StartError("no ring manager runs")
        raise failure

    @property
    def pool(self) -> str:
        """Name of the pool."""
        return os.environ.get("DUALMAP_POOL__NAME", "default")

    async def _start(self) -> None:
        if self.redis_url:
            await _require_given_redis()
        else:
            self.valkey = await EmbeddedValkey.start(self.folder, self.options.restartable)
            self.redis_url = self.valkey.url
        # The others are told where the ring managers are.
        await self._start_together([name for name in self._specs() if name.startswith("ringmanager")])
        rest = [name for name in self._specs() if not name.startswith("ringmanager")]
        # Agents are told where the routers are, for their front doors.
        await self._start_together([name for name in rest if not name.startswith("agent")])
        await self._start_together([name for name in rest if name.startswith("agent")])
        await self._wait_ready()

    async def _start_together(self, names: Sequence[str]) -> None:
        # Two at a time: more only lengthen each other's imports on a small machine.
        gate = asyncio.Semaphore(max(2, os.cpu_count() or 2))

        async def one(name: str) -> None:
            async with gate:
                await self.start(name)

        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(one(name))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _wait_ready(self) -> None:
        wanted = self.options.instances
        address = self.services["ringmanager-1"].address
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), RingCalls(address, self.pool) as calls:
                async for ring in calls.watch(0, READY_TIMEOUT_S):
                    if sum(member.state is InstanceState.ACTIVE for member in ring.members) == wanted:
                        break
            await asyncio.gather(*(wait_serving(router, READY_TIMEOUT_S) for router in self.router_addresses))
        except (TimeoutError, RingCallError) as error:
            raise StartError(f"not all {wanted} instances are ACTIVE after {READY_TIMEOUT_S:g} s; {error}") from None

    async def _stop(self) -> None:
        order = ("router", "agent", "rebalancer", "statecollector", "ringmanager")
        for role in order:
            stopping = [s for name, s in self.services.items() if name.startswith(role)]
            await asyncio.gather(*(service.stop(grace_s=5.0) for service in stopping))
        if self.valkey is not None:
            await self.valkey.stop()
        await self._stack.aclose()

    def _specs(self) -> dict[str, ServiceSpec]:
        options = self.options
        names = [f"ringmanager-{i}" for i in range(1, options.ring_managers + 1)]
        names += [f"statecollector-{i}" for i in range(1, options.collectors + 1)]
        names += [f"rebalancer-{i}" for i in range(1, options.rebalancers + 1)] if options.rebalance else []
        names += [f"router-{i}" for i in range(1, options.routers + 1)]
        names += [f"agent-{i}" for i in range(1, options.instances + 1)]
        return {name: self._spec(name) for name in names}

    def _spec(self, name: str, former: RunningService | None = None) -> ServiceSpec:
        role = name.rsplit("-", 1)[0]
        environment = self._shared_environment() | self._role_environment(role, name) | dict(self.options.environment)
        if former is not None:
            environment["DUALMAP_SERVER__PORT"] = str(former.serving["port"])
        elif self.options.restartable:
            environment["DUALMAP_SERVER__PORT"] = str(_quiet_port())
        module = "services.instanceagent" if role == "agent" else f"services.{role}"
        return ServiceSpec(name, module, environment, self.folder / f"{name}.log")

    def _shared_environment(self) -> dict[str, str]:
        return {
            "DUALMAP_REDIS__URL": self.redis_url,
            "DUALMAP_SERVER__PORT": "0",
            "DUALMAP_METRICS__PORT": "0",
            "DUALMAP_POOL__TTFT_SLO_MS": str(max(1, round(self.options.ttft_slo_ms / self.options.speed))),
        }

    def _role_environment(self, role: str, name: str) -> dict[str, str]:
        options = self.options
        ring_managers = ",".join(s.address for n, s in self.services.items() if n.startswith("ringmanager"))
        match role:
            case "ringmanager":
                return {"DUALMAP_RING__START_DEPTH": str(options.start_depth)}
            case "statecollector":
                return {"DUALMAP_POLL__INTERVAL_MS": str(options.period_ms(options.poll_ms))}
            case "rebalancer":
                return {"DUALMAP_REBALANCE__PERIOD_MS": str(options.period_ms(options.rebalance_ms))}
            case "router":
                ring_file = str(self.folder / f"{name}.ring")
                return {"DUALMAP_ROUTER__RING_MANAGERS": ring_managers, "DUALMAP_ROUTER__RING_FILE": ring_file}
            case _:
                return self._agent_environment(name, ring_managers)

    def _agent_environment(self, name: str, ring_managers: str) -> dict[str, str]:
        options = self.options
        return {
            "DUALMAP_HTTP__PORT": "0",
            "DUALMAP_AGENT__ID": name,
            "DUALMAP_AGENT__ROUTERS": ",".join(self.router_addresses),
            "DUALMAP_AGENT__RING_MANAGERS": ring_managers,
            "DUALMAP_AGENT__QUEUE_POLICY": options.queue_policy,
            "DUALMAP_AGENT__BINDING": options.binding,
            "DUALMAP_AGENT__MAX_WAIT_MS": str(max(1, round(options.max_wait_s * 1_000 / options.speed))),
            "DUALMAP_ENGINE__KIND": "simulated",
            "DUALMAP_ENGINE__PREFILL_MS": str(options.cost.a_s * 1e3 / options.speed),
            "DUALMAP_ENGINE__PREFILL_US_PER_TOKEN": str(options.cost.b_s_per_token * 1e6 / options.speed),
            "DUALMAP_ENGINE__PREFILL_PS_PER_TOKEN2": str(options.cost.c_s_per_token2 * 1e12 / options.speed),
            "DUALMAP_ENGINE__KV_TOKENS": str(options.kv_tokens),
            "DUALMAP_ENGINE__DECODE_TOKENS_PER_S": str(options.decode_tokens_per_s * options.speed),
            "DUALMAP_ENGINE__FAULTS": "true" if options.engine_faults else "false",
        }


def _quiet_port() -> int:
    """A free port that the system gives to no outgoing connection: nobody takes it while its owner restarts."""
    while True:
        port = random.randrange(*_QUIET_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


async def _require_given_redis() -> None:
    settings = load_settings(ServiceSettings, []).redis
    client = connect(settings.options("dualmap-cli"))
    try:
        await require_redis(client, settings)
    except CannotStart as error:
        raise StartError(str(error)) from None
    finally:
        await client.aclose()


async def current_ring(address: str, pool: str, timeout_s: float) -> RingSnapshot:
    """The ring that the ring manager at this address holds. Raises RingCallError when it has none in time."""
    async with RingCalls(address, pool) as calls, aclosing(calls.watch(0, timeout_s)) as rings:
        return await anext(rings)
