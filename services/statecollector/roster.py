"""Which instances this collector polls: the ring's members, divided among the live collectors. Judges no instance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dualmap.core.membership import InstanceState, RingSnapshot
from dualmap.runtime.health import Component
from dualmap.runtime.logs import get_log
from dualmap.store.connection import StoreError
from dualmap.store.leases import CollectorRegister, share_owner
from dualmap.store.packing import UnreadableValueError
from dualmap.store.ring_store import RingStore
from services.statecollector.poller import Outside, Poller, Target
from services.statecollector.settings import PollSettings, ShareSettings

_log = get_log("roster")


@dataclass(frozen=True, slots=True)
class Shares:
    """What the division is made from."""

    collector_id: str
    register: CollectorRegister
    rings: RingStore
    share: ShareSettings
    poll: PollSettings


@dataclass(slots=True)
class _Running:
    poller: Poller
    task: asyncio.Task[None]
    stop: asyncio.Event


class Roster:
    """Starts and stops pollers as ring and collectors change; `turn` is for a periodic loop."""

    def __init__(self, shares: Shares, outside: Outside, redis: Component) -> None:
        self.ring: RingSnapshot | None = None
        self.collectors: tuple[str, ...] = ()
        self._shares = shares
        self._outside = outside
        self._redis = redis
        self._running: dict[str, _Running] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the ring last read, 0 for none."""
        return self.ring.epoch if self.ring is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the ring last read, by id."""
        if self.ring is None:
            return ()
        return tuple(sorted(m.instance_id for m in self.ring.members if m.state is not InstanceState.LEFT))

    @property
    def polled(self) -> tuple[str, ...]:
        """Instances polled here, by id."""
        return tuple(sorted(self._running))

    def owner_of(self, instance_id: str) -> str:
        """Collector that polls the instance, empty for none."""
        return share_owner(instance_id, self.collectors) or ""

    def polled_ago_ms(self, instance_id: str) -> float:
        """Milliseconds since the last good poll from here, negative for none."""
        running = self._running.get(instance_id)
        if running is None or running.poller.polled_at_s is None:
            return -1.0
        return (self._outside.clock.now_s() - running.poller.polled_at_s) * 1_000

    async def turn(self) -> None:
        """Beat, read the ring if it moved, start and stop pollers, remove states of the departed."""
        try:
            self.collectors = await self._shares.register.beat(self._shares.collector_id, self._shares.share.ttl_ms)
            # Before the ring: a state is written only after its instance is on the ring.
            known = await self._outside.store.known_instances()
            await self._read_ring()
        except (StoreError, UnreadableValueError) as error:
            # The pollers go on: they need the store themselves and will say so.
            self._redis.fail(f"{type(error).__name__}: {error}")
            return
        self._redis.ok()
        await self._divide()
        await self._remove_departed(known)

    async def close(self) -> None:
        """Stop every poller and give the share up at once."""
        await self._stop(list(self._running))
        try:
            await self._shares.register.leave(self._shares.collector_id)
        except StoreError as error:
            # The registration ends by itself.
            _log.warning("leave_failed", error=type(error).__name__)

    async def _read_ring(self) -> None:
        stored = await self._shares.rings.epoch()
        if stored == self.epoch:
            return
        if stored < self.epoch:
            _log.warning("epoch_backward", stored=stored, held=self.epoch)
        ring = await self._shares.rings.load()
        # An emptied store says nothing about who lives: the last members are polled until there is a ring again.
        if ring is not None:
            self.ring = ring
            self._outside.store.expect(len(self.members))

    async def _divide(self) -> None:
        ring = self.ring
        if ring is None:
            return
        me = self._shares.collector_id
        mine = {
            member.instance_id: Target(member.instance_id, member.grpc_address)
            for member in ring.members
            if member.state is not InstanceState.LEFT and share_owner(member.instance_id, self.collectors) == me
        }
        await self._stop([name for name, running in self._running.items() if mine.get(name) != running.poller.target])
        for name, target in mine.items():
            if name not in self._running or self._running[name].task.done():
                self._start(target)
        self._outside.metrics.polling(len(self._running))
        await self._outside.calls.keep(frozenset(target.address for target in mine.values()))

    def _start(self, target: Target) -> None:
        stop = asyncio.Event()
        poller = Poller(target, self._shares.poll, self._outside)
        task = asyncio.create_task(poller.run(stop), name=f"poll {target.instance_id}")
        task.add_done_callback(_report_defect)
        self._running[target.instance_id] = _Running(poller, task, stop)

    async def _stop(self, names: list[str]) -> None:
        stopped = [self._running.pop(name) for name in names]
        for running in stopped:
            running.stop.set()
            # A held poll would last a second; a cut write is conditional like any other.
            running.task.cancel()
        await asyncio.gather(*(running.task for running in stopped), return_exceptions=True)

    async def _remove_departed(self, known: set[str]) -> None:
        if self.ring is None:
            return
        gone = known.difference(self.members)
        mine = [name for name in gone if share_owner(name, self.collectors) == self._shares.collector_id]
        try:
            for name in mine:
                await self._outside.store.remove(name)
                _log.info("state_removed", instance=name)
        except StoreError as error:
            self._redis.fail(f"{type(error).__name__}: {error}")
            return
        self._outside.metrics.removed(len(mine))


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        # The next turn starts another poller; the defect must not pass unseen.
        _log.error("poller_failed", task=task.get_name(), error=type(error).__name__, exc_info=error)
