"""What operators are told: states as Redis has them, with who polls whom. Routers read Redis themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from dualmap.core.errors import NotFound, Overloaded, UnknownInstance
from dualmap.core.state import LoadReport
from dualmap.rpc.convert_state import InstanceFacts
from dualmap.store.state_store import StateStore
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.roster import Roster

QUEUED_CHANGES = 64
"""Messages a watcher may be behind: six seconds at ten a second."""

_RETRY_MS = 1_000
_HEADS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Page:
    """Some instances by id; ``next_token`` is empty after the last."""

    ring_epoch: int
    instances: tuple[InstanceFacts, ...]
    next_token: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One message of a watch."""

    ring_epoch: int
    changed: tuple[InstanceFacts, ...]
    left: tuple[str, ...] = ()
    snapshot: bool = False


@dataclass(eq=False, slots=True)
class _Watcher:
    wanted: frozenset[str]
    queue: asyncio.Queue[Change | None] = field(default_factory=lambda: asyncio.Queue(QUEUED_CHANGES))
    cut_off: bool = False

    def wants(self, instance_id: str) -> bool:
        return not self.wanted or instance_id in self.wanted


class Directory:
    """Answers of one pool; an empty pool name means that one."""

    def __init__(self, store: StateStore, roster: Roster, metrics: CollectorMetrics) -> None:
        self._pool = metrics.pool
        self._metrics = metrics
        self._store = store
        self._roster = roster
        self._watchers: set[_Watcher] = set()
        self._wanted = asyncio.Event()
        self._closed = False

    def check_pool(self, pool: str) -> None:
        """Raises NotFound for another pool."""
        if pool not in ("", self._pool):
            raise NotFound("pool", pool)

    async def page(self, page_size: int, token: str) -> Page:
        """Members after ``token`` (an id), at most ``page_size``. Raises StoreError."""
        names = [name for name in self._roster.members if name > token]
        facts = await self._facts(names[:page_size])
        following = names[page_size - 1] if len(names) > page_size else ""
        return Page(self._roster.epoch, facts, following)

    async def instance(self, instance_id: str) -> InstanceFacts:
        """One member. Raises UnknownInstance, StoreError."""
        if instance_id not in self._roster.members:
            raise UnknownInstance(instance_id)
        (facts,) = await self._facts([instance_id])
        return facts

    @property
    def ring_epoch(self) -> int:
        """Epoch of the ring that the answers are about."""
        return self._roster.epoch

    async def watch(self, instance_ids: Sequence[str]) -> AsyncGenerator[Change, None]:
        """All of it first, then each change. Raises Overloaded for a reader too slow, StoreError at the start."""
        watcher = _Watcher(frozenset(instance_ids))
        if self._closed:
            return
        self._watchers.add(watcher)
        self._wanted.set()
        try:
            facts = await self._facts([name for name in self._roster.members if watcher.wants(name)])
            yield Change(self._roster.epoch, facts, snapshot=True)
            while (change := await watcher.queue.get()) is not None:
                if watcher.cut_off:
                    raise Overloaded(_RETRY_MS, "this watcher reads too slowly")
                yield change
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._wanted.clear()

    def close(self) -> None:
        """End every watch: the process stops."""
        self._closed = True
        for watcher in self._watchers:
            while not watcher.queue.empty():
                watcher.queue.get_nowait()
            watcher.queue.put_nowait(None)

    async def watched(self) -> None:
        """Return when there is a watcher."""
        await self._wanted.wait()

    @property
    def has_watchers(self) -> bool:
        """Whether anyone watches."""
        return bool(self._watchers)

    async def tell(self, changed: Sequence[str], left: Sequence[str]) -> None:
        """Tell the watchers; one whose queue is full is cut off instead. Raises StoreError."""
        members = set(self._roster.members)
        facts = await self._facts([name for name in changed if name in members])
        for watcher in tuple(self._watchers):
            wanted = tuple(fact for fact in facts if watcher.wants(fact.instance_id))
            gone = tuple(name for name in left if watcher.wants(name))
            if not wanted and not gone:
                continue
            try:
                watcher.queue.put_nowait(Change(self._roster.epoch, wanted, gone))
            except asyncio.QueueFull:
                watcher.cut_off = True
                self._metrics.cut_off()
                self._watchers.discard(watcher)

    async def _facts(self, names: Sequence[str]) -> tuple[InstanceFacts, ...]:
        facts: list[InstanceFacts] = []
        for start in range(0, len(names), _HEADS_AT_ONCE):
            part = names[start : start + _HEADS_AT_ONCE]
            heads = await self._store.heads(part)
            for name in part:
                head = heads.get(name)
                facts.append(
                    InstanceFacts(
                        instance_id=name,
                        incarnation=head.base.incarnation if head else 0,
                        agent_epoch=head.base.agent_epoch if head else 0,
                        version=head.base.version if head else 0,
                        kv_blocks=head.kv_blocks if head else 0,
                        kv_digest=head.kv_digest if head else 0,
                        load=head.load if head else LoadReport(),
                        reachable=head is not None and head.reachable,
                        polled_ago_ms=self._roster.polled_ago_ms(name),
                        collector=self._roster.owner_of(name),
                    )
                )
        return tuple(facts)
