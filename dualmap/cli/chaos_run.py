"""One seed of chaos: a cluster of its own, a load, the faults of the plan, and what came of it.

Touches only processes that it started.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dualmap.cli.chaos_load import Load, Seen
from dualmap.cli.chaos_plan import Act, Fault, PlanOptions, plan_faults
from dualmap.cli.chaos_watch import Probe, Watch
from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.processes import StartError
from dualmap.client import ClientOptions, DualMapClient

AGREE_WITHIN_S = 2.0
"""Every view equals the agents' own so soon after the last fault and the last request."""

RECOVER_TIMEOUT_S = 30.0
SETTLE_S = 1.0
"""Routes of a router count as touched so long after it is back: its first calls find cold code."""

_LOOK_S = 0.05
_RESTARTS = 20

_OWN_PART = {"router", "statecollector", "agent", "redis"}


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """One seed's run. ``rate`` in requests a wall second; ``speed`` as of a replay."""

    plan: PlanOptions = field(default_factory=PlanOptions)
    instances: int = 4
    rate: float = 12.0
    speed: float = 1.5

    def cluster(self, seed: int) -> LocalOptions:
        """Two of everything that can stand in for one another; odd seeds bind late, so that requests are handed over.

        The objective is short for the same reason: what waits is soon predicted to miss it.
        """
        return LocalOptions(
            instances=self.instances,
            routers=2,
            ring_managers=2,
            collectors=2,
            rebalancers=2,
            speed=self.speed,
            ttft_slo_ms=2_000,
            binding="late" if seed % 2 else "early",
            restartable=True,
        )


@dataclass(slots=True)
class Hurt:
    """One fault as it happened; times on the monotonic clock. ``recovery_s`` None: not within the bound."""

    fault: Fault
    part: str
    began_s: float
    ended_s: float = 0.0
    recovery_s: float | None = None

    def alone(self, others: Sequence[Hurt]) -> bool:
        """Whether no other fault touched this one's recovery."""
        until_s = self.ended_s + (self.recovery_s or 0.0)
        return all(
            other is self or other.ended_s + SETTLE_S < self.began_s or other.began_s > until_s for other in others
        )


@dataclass(slots=True)
class SeedResult:
    """What came of one seed.

    ``drained_after_s``: from the last fault's end to the last request's; ``agreed_after_s``: from there until every
    view equals the agents' own, None: never.
    """

    seed: int
    seen: list[Seen] = field(default_factory=list)
    hurts: list[Hurt] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    drained_after_s: float = 0.0
    agreed_after_s: float | None = None
    seconds: float = 0.0

    def untouched(self) -> list[Probe]:
        """Route calls that were answered by routers while nothing was done to them."""
        touched = [(hurt.part, hurt.began_s, hurt.ended_s + SETTLE_S) for hurt in self.hurts]
        return [
            probe
            for probe in self.probes
            if probe.took_s is not None
            and not any(part == probe.router and begin <= probe.at_s <= end for part, begin, end in touched)
        ]


async def run_seed(seed: int, options: ChaosOptions, tell: Callable[[str], None]) -> SeedResult:
    """Run one seed; problems found are in the result, only a cluster that does not start raises StartError."""
    began_s = time.monotonic()
    result = SeedResult(seed)
    async with LocalCluster(options.cluster(seed)) as cluster, Watch(cluster) as watch:
        await _within(RECOVER_TIMEOUT_S, watch.all_see_all)
        # Two routers, one hurt at a time: a silent one must cost less than the whole time for a route.
        async with DualMapClient(cluster.router_addresses, ClientOptions()) as client:
            load = Load(client, seed, options.rate, f"chaos-{seed}")
            await _Run(cluster, watch, load, result, tell).run(plan_faults(seed, options.plan))
    result.seen = load.seen
    result.probes = watch.probes
    result.problems += [f"{seen.request_id}: {problem}" for seen in load.seen if (problem := seen.problem())]
    result.seconds = time.monotonic() - began_s
    return result


class _Run:
    """Faults over a load on one running cluster."""

    def __init__(
        self, cluster: LocalCluster, watch: Watch, load: Load, result: SeedResult, tell: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._watch = watch
        self._load = load
        self._result = result
        self._tell = tell
        self._start_s = 0.0
        self._under_way = 0
        self._stop_load = asyncio.Event()

    async def run(self, faults: tuple[Fault, ...]) -> None:
        """All faults, then quiet, then the comparison."""
        self._start_s = time.monotonic()
        self._under_way = len(faults)
        stop_probes = asyncio.Event()
        prefix = f"probe-{self._result.seed}"
        probes = [
            asyncio.create_task(self._watch.probe(router, stop_probes, prefix))
            for router in self._cluster.services
            if router.startswith("router")
        ]
        sending = asyncio.create_task(self._load.run(self._stop_load))
        try:
            async with asyncio.TaskGroup() as group:
                for fault in faults:
                    group.create_task(self._hurt(fault))
        finally:
            self._stop_load.set()
            stop_probes.set()
            await asyncio.gather(sending, *probes)

    async def _quiet(self) -> None:
        """The last fault is over: nothing more is sent, and what is under way ends; then views are compared."""
        ended_s = time.monotonic()
        self._stop_load.set()
        await self._load.finish()
        self._result.drained_after_s = time.monotonic() - ended_s
        await self._compare()

    async def _hurt(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, self._start_s + fault.at_s - time.monotonic()))
        part = await self._part_of(fault)
        if part is None:
            self._under_way -= 1
            self._result.problems.append(f"no {fault.role} to hurt: none leads within {RECOVER_TIMEOUT_S:g} s")
            return
        hurt = Hurt(fault, part, time.monotonic())
        self._result.hurts.append(hurt)
        self._tell(f"{hurt.began_s - self._start_s:6.1f} s  {fault.label} ({part})")
        recovering = None
        if fault.role not in _OWN_PART:
            # Another takes over while it is away.
            recovering = asyncio.create_task(self._recovered(hurt, hurt.began_s))
        await (self._kill(hurt) if fault.act is Act.KILL else self._pause(hurt))
        hurt.ended_s = time.monotonic()
        self._under_way -= 1
        comparing = asyncio.create_task(self._quiet()) if self._under_way == 0 else None
        await (recovering or self._recovered(hurt, hurt.ended_s))
        if hurt.recovery_s is None:
            self._result.problems.append(f"{fault.label} ({part}): no recovery within {RECOVER_TIMEOUT_S:g} s")
        if comparing is not None:
            await comparing

    async def _part_of(self, fault: Fault) -> str | None:
        if fault.role == "redis":
            return "redis"
        if fault.role in ("ringmanager", "rebalancer"):
            found: list[str] = []

            async def leads() -> bool:
                leader = await self._watch.leader(fault.role)
                found.extend([leader] if leader is not None else [])
                return bool(found)

            return found[0] if await _within(RECOVER_TIMEOUT_S, leads) else None
        parts = self._cluster.role(fault.role)
        return parts[int(fault.pick * len(parts))]

    def _send(self, part: str, number: signal.Signals) -> None:
        if part != "redis":
            self._cluster.services[part].send(number)
        elif self._cluster.valkey is not None:
            self._cluster.valkey.send(number)

    async def _pause(self, hurt: Hurt) -> None:
        self._send(hurt.part, signal.SIGSTOP)
        try:
            await asyncio.sleep(hurt.fault.lasts_s)
        finally:
            self._send(hurt.part, signal.SIGCONT)

    async def _kill(self, hurt: Hurt) -> None:
        self._send(hurt.part, signal.SIGKILL)
        await asyncio.sleep(hurt.fault.lasts_s)
        if hurt.part == "redis":
            if self._cluster.valkey is not None:
                await self._cluster.valkey.restart(empty=hurt.fault.empty)
            return
        # As an orchestrator does: a service that finds no Redis ends, and is started again.
        for _ in range(_RESTARTS):
            try:
                await self._cluster.start(hurt.part)
            except StartError as error:
                self._tell(f"          {hurt.part} again: {str(error).splitlines()[-1].strip()}")
            else:
                return
        self._result.problems.append(f"{hurt.part} could not be started again")

    async def _recovered(self, hurt: Hurt, since_s: float) -> None:
        role = hurt.fault.role
        well: Callable[[], Awaitable[bool]]
        if role in ("ringmanager", "rebalancer"):
            well = self._another_leads(role, hurt.part)
        elif role == "router":
            well = partial(self._watch.sees_all, hurt.part)
        else:
            well = self._watch.all_see_all
        if await _within(RECOVER_TIMEOUT_S, well):
            hurt.recovery_s = time.monotonic() - since_s

    def _another_leads(self, role: str, hurt_part: str) -> Callable[[], Awaitable[bool]]:
        async def well() -> bool:
            leader = await self._watch.leader(role)
            # One that was paused for less than its lease leads on.
            return leader is not None and (leader != hurt_part or self._cluster.services[hurt_part].running)

        return well

    async def _compare(self) -> None:
        quiet_s = time.monotonic()
        differing: list[str] = []
        while time.monotonic() - quiet_s < RECOVER_TIMEOUT_S:
            differing = await self._watch.differing()
            if not differing:
                self._result.agreed_after_s = time.monotonic() - quiet_s
                break
            await asyncio.sleep(_LOOK_S)
        if self._result.agreed_after_s is None:
            self._result.problems += [f"after {RECOVER_TIMEOUT_S:g} s: {line}" for line in differing]
        elif self._result.agreed_after_s > AGREE_WITHIN_S:
            self._result.problems.append(f"views equal agents only after {self._result.agreed_after_s:.1f} s")


async def _within(timeout_s: float, well: Callable[[], Awaitable[bool]]) -> bool:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if await well():
            return True
        await asyncio.sleep(_LOOK_S)
    return False
