"""A process's picture of one pool: ring, loads, indexes, freshness. A follower fills it; it does no I/O itself.

Readers hold ``lock`` while they read ``instances``; ``picture`` is replaced as a whole and needs no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from dualmap.core.bookings import Bookings
from dualmap.core.choose import RingPicture
from dualmap.core.instance_view import DEFAULT_BOOKING_TTL_MS, InstanceView
from dualmap.core.keys import SplitTable
from dualmap.core.kv_index import KvIndex
from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot, Split
from dualmap.core.ring import Ring
from dualmap.core.state import LoadReport
from dualmap.view.events import EventHook, ViewEvent
from dualmap.view.reachability import Reachability

Lock = AbstractContextManager[object]
"""A threading.Lock, or contextlib.nullcontext() where one loop both fills and reads."""

_RingKey = tuple[RingParameters, tuple[tuple[str, float], ...]]


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """``router_id`` 0: this reader books nothing. ``lease_ms``: the members' lease, for judging mass failures."""

    router_id: int = 0
    booking_ttl_ms: float = DEFAULT_BOOKING_TTL_MS
    lease_ms: float = 3_000.0


@dataclass(frozen=True, slots=True)
class WholeState:
    """One instance's state as loaded; ``index_version`` may differ from ``version``, which is the load's."""

    instance_id: str
    incarnation: int
    agent_epoch: int
    version: int
    index: KvIndex
    index_version: int
    load: LoadReport
    reachable: bool
    heard_at_ms: float


class ClusterView:
    """One pool as seen from here. ``clock_ms`` is the monotonic clock that ages are measured with."""

    def __init__(
        self,
        pool: str,
        lock: Lock,
        clock_ms: Callable[[], float],
        options: ViewOptions | None = None,
        on_event: EventHook | None = None,
    ) -> None:
        self.pool = pool
        self.lock = lock
        self.clock_ms = clock_ms
        self.options = options or ViewOptions()
        self.counts: Counter[ViewEvent] = Counter()
        self.picture: RingPicture | None = None
        self.ring: RingSnapshot | None = None
        self.instances: dict[str, InstanceView] = {}
        self.degraded = True
        self._on_event = on_event
        self._reachability = Reachability(self.options.lease_ms)
        self._built: dict[_RingKey, Ring] = {}
        self._grace_until_ms = 0.0

    @property
    def ready(self) -> bool:
        """Whether there is a ring to decide with, fresh or not."""
        return self.picture is not None

    @property
    def epoch(self) -> int:
        """Epoch of the ring held, 0 for none."""
        return self.ring.epoch if self.ring is not None else 0

    def count(self, event: ViewEvent, about: str = "") -> None:
        """Count an event and tell the hook."""
        self.counts[event] += 1
        if self._on_event is not None:
            self._on_event(event, about)

    def adopt_ring(self, ring: RingSnapshot) -> tuple[str, ...]:
        """Take a ring over: the instances that are new here. Raises InvalidRequest for a ring that contradicts itself.

        The rings are built before the lock is taken; members that left are dropped with all that is known of them.
        """
        picture = self._picture_of(ring)
        now_ms = self.clock_ms()
        members = {member.instance_id: member for member in ring.members if member.state is not InstanceState.LEFT}
        with self.lock:
            for gone in self.instances.keys() - members.keys():
                del self.instances[gone]
                self._reachability.forget(gone)
            new = tuple(name for name in members if name not in self.instances)
            for name, member in members.items():
                self._view_of(name).member = member
            self._grace_until_ms = now_ms + (ring.previous.grace_left_ms if ring.previous is not None else 0)
            self.ring = ring
            self.picture = picture
            self._judge_reachability(now_ms)
        return new

    def tick(self) -> None:
        """Let time pass: grace periods end, bookings that no report will cover expire, mass failures are judged."""
        now_ms = self.clock_ms()
        picture = self.picture
        with self.lock:
            if picture is not None and picture.previous is not None and now_ms >= self._grace_until_ms:
                self.picture = replace(picture, previous=None)
            for view in self.instances.values():
                view.bookings.expire(now_ms, self.options.booking_ttl_ms)
            self._judge_reachability(now_ms)

    def adopt_state(self, state: WholeState) -> None:
        """Take a loaded state over; bookings stay unless the agent has a new life. The index is swapped, not copied."""
        now_ms = self.clock_ms()
        with self.lock:
            view = self.instances.get(state.instance_id)
            if view is None:
                return
            if view.agent_epoch != state.agent_epoch:
                view.bookings = Bookings()
            view.kv = state.index
            view.incarnation, view.agent_epoch, view.version = state.incarnation, state.agent_epoch, state.index_version
            view.load = state.load
            view.heard_at_ms = state.heard_at_ms
            for seen in state.load.tickets:
                if seen.router_id == view.router_id:
                    view.bookings.cover(seen)
            self._say_reachable(state.instance_id, state.reachable, now_ms)

    def say_reachable(self, instance_id: str, reachable: bool) -> None:
        """Take in what a collector said of a member."""
        with self.lock:
            self._say_reachable(instance_id, reachable, self.clock_ms())

    def _say_reachable(self, instance_id: str, reachable: bool, now_ms: float) -> None:
        # Almost every entry says what is known, and judging costs a look at every instance.
        if self._reachability.say(instance_id, reachable, now_ms):
            self._judge_reachability(now_ms)

    def _judge_reachability(self, now_ms: float) -> None:
        if self._reachability.judge(self.instances.keys(), now_ms):
            self.count(ViewEvent.MASS_UNREACHABLE, f"{len(self.instances)} instances")
        for name, view in self.instances.items():
            view.reachable = self._reachability.usable(name)

    def _view_of(self, instance_id: str) -> InstanceView:
        view = self.instances.get(instance_id)
        if view is None:
            view = InstanceView(
                instance_id, router_id=self.options.router_id, booking_ttl_ms=self.options.booking_ttl_ms
            )
            self.instances[instance_id] = view
        return view

    def _picture_of(self, ring: RingSnapshot) -> RingPicture:
        built: dict[_RingKey, Ring] = {}
        previous = None
        if ring.previous is not None and ring.previous.grace_left_ms > 0:
            previous = self._mapping_of(ring.parameters, ring.previous.members, ring.previous.splits, built)
        now, splits = self._mapping_of(ring.parameters, ring.members, ring.splits, built)
        self._built = built
        return RingPicture(
            ring=now,
            splits=splits,
            parameters=ring.parameters,
            epoch=ring.epoch,
            default_slo_s=ring.default_ttft_slo_ms / 1_000,
            previous=previous,
        )

    def _mapping_of(
        self,
        parameters: RingParameters,
        members: tuple[Member, ...],
        splits: tuple[Split, ...],
        built: dict[_RingKey, Ring],
    ) -> tuple[Ring, SplitTable]:
        # Most epochs change states or splits only: the points stay, and sorting them is the costly part.
        on_ring = tuple(sorted((member.instance_id, member.weight) for member in members if member.state.on_ring))
        key = (parameters, on_ring)
        ring = built.get(key) or self._built.get(key) or Ring.build(members, parameters)
        built[key] = ring
        return ring, SplitTable.build(splits)
