"""Polls one instance and writes what it says, on the base it last wrote; one deadline a poll, nobody else waits for it.

It holds no truth: base and index come from Redis and the agent, and are asked for again after any doubt.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from dualmap.core.errors import InvalidRequest
from dualmap.core.state import StateUpdate
from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.state_calls import StateCallError, StateCalls
from dualmap.runtime.clock import Clock
from dualmap.runtime.logs import get_log
from dualmap.store.connection import StoreError
from dualmap.store.state_store import StateStore
from dualmap.store.state_writer import Base
from services.statecollector.checked_index import CheckedIndex
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.settings import PollSettings

_INLINE_BYTES = 256 * 1_024
"""32,768 blocks are indexed, or changed, within a few milliseconds; beyond that the other polls must not wait."""

_log = get_log("poller")


@dataclass(frozen=True, slots=True)
class Outside:
    """What every poller of the process shares."""

    calls: StateCalls
    store: StateStore
    metrics: CollectorMetrics
    clock: Clock


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to poll, and where."""

    instance_id: str
    address: str


class Poller:
    """One instance's polling, in one task."""

    def __init__(self, target: Target, settings: PollSettings, outside: Outside) -> None:
        self.target = target
        self.polled_at_s: float | None = None
        self._settings = settings
        self._outside = outside
        self._base: Base | None = None
        self._read_base = False
        self._index: CheckedIndex | None = None
        self._announce = False
        self._idle = False
        self._failures = 0
        self._marked = False
        self._store_lost = False

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until ``stop``; every failure is counted and survived."""
        # Spread the first polls too: a new collector takes a whole share over at once.
        pause_s = random.random() * self._settings.interval_ms / 1_000
        while not await self._outside.clock.wait(stop, pause_s):
            began_s = self._outside.clock.now_s()
            least_s = await self.turn()
            pause_s = max(0.0, self._at_tick(began_s + least_s) - self._outside.clock.now_s())

    def _at_tick(self, due_s: float) -> float:
        # The nearest, so that periods stay as long as they are on average.
        tick_s = self._settings.tick_ms / 1_000
        return round(due_s / tick_s) * tick_s if tick_s else due_s

    async def turn(self) -> float:
        """Poll once and write: seconds from this turn's start to the next one's."""
        try:
            pause_s = await self._poll()
        except StoreError as error:
            self._outside.metrics.wrote("failed")
            if not self._store_lost:
                self._store_lost = True
                _log.warning("store_failed", instance=self.target.instance_id, error=type(error).__name__)
            return self._settings.backoff_ms / 1_000
        self._store_lost = False
        return pause_s

    async def _poll(self) -> float:
        if not self._read_base:
            await self._take_base_from_store()
        query = self._query()
        began_s = self._outside.clock.now_s()
        timeout_s = (self._settings.timeout_ms + query.wait_ms) / 1_000
        try:
            update = await self._outside.calls.get_state(self.target.address, query, timeout_s)
        except StateCallError as error:
            return await self._failed(error)
        ended_s = self._outside.clock.now_s()
        self._outside.metrics.polled("ok", None if query.wait_ms else ended_s - began_s)
        self.polled_at_s = ended_s
        self._failures = 0
        if update.load is not None:
            self._idle = not (update.load.waiting_requests or update.load.running_requests)
        try:
            if not update.full:
                return await self._take_step(update)
            # Not asked for: the agent has forgotten what led from our base to here, and will not tell it later.
            self._announce = self._announce or not query.full
            return await self._take_whole(update)
        except InvalidRequest as error:
            return self._lied("invalid", error.message)

    def _query(self) -> StateQuery:
        base = self._base
        if base is None or self._index is None:
            return StateQuery(self.target.instance_id, full=True)
        held = self._idle and not self._failures and not self._marked
        return StateQuery(
            self.target.instance_id,
            base.incarnation,
            base.agent_epoch,
            base.version,
            wait_ms=self._settings.hold_ms if held else 0,
        )

    async def _take_base_from_store(self) -> None:
        head = (await self._outside.store.heads([self.target.instance_id])).get(self.target.instance_id)
        self._base = head.base if head is not None else None
        self._marked = head is not None and not head.reachable
        self._read_base = True

    async def _take_whole(self, update: StateUpdate) -> float:
        index = await _index_of(update)
        pause_s = self._interval_s()
        if not index.agrees(update):
            pause_s = self._lied("digest", "of a whole state")
            update = replace(update, kv_digest=index.digest, kv_blocks=index.blocks)
        if self._covers_base(update) and not self._announce:
            # Followers have this life already: packing it anew spares them a load, and the next poll tells the rest.
            if await self._outside.store.rewrite(update):
                self._outside.metrics.wrote("rewritten")
                self._index = index
                return 0.0
            self._doubt()
            return pause_s
        outcome = await self._outside.store.write(update)
        if outcome or outcome.stored == _base_of(update):
            self._wrote("whole", update)
            self._index = index
            self._announce = False
            return pause_s
        self._refused(outcome.stored)
        return self._settings.backoff_ms / 1_000

    async def _take_step(self, update: StateUpdate) -> float:
        base, index = self._base, self._index
        if base is None or index is None:
            return self._lied("not_full", "a whole state was asked for")
        same_life = (update.incarnation, update.agent_epoch) == (base.incarnation, base.agent_epoch)
        if not same_life or update.since != base.version or update.version < update.since:
            return self._lied("version", f"from {update.since} to {update.version}, stored {base.version}")
        advanced = (
            await asyncio.to_thread(index.advance, update)
            if len(update.changes) > _INLINE_BYTES
            else index.advance(update)
        )
        if not advanced:
            return self._lied("digest", f"at version {update.version}")
        outcome = await self._outside.store.write(update)
        if not outcome and outcome.stored != _base_of(update):
            self._refused(outcome.stored)
            return self._interval_s()
        self._wrote("changes", update)
        if self._outside.store.rewrite_due(outcome.behind):
            self._index = None
            return 0.0
        return self._interval_s()

    def _covers_base(self, update: StateUpdate) -> bool:
        base = self._base
        return (
            base is not None
            and (update.incarnation, update.agent_epoch) == (base.incarnation, base.agent_epoch)
            and update.version >= base.version
        )

    def _wrote(self, kind: str, update: StateUpdate) -> None:
        self._outside.metrics.wrote(kind)
        self._base = _base_of(update)
        if self._marked:
            self._marked = False
            _log.info("instance_reachable", instance=self.target.instance_id)

    def _refused(self, stored: Base | None) -> None:
        """Another collector, or an emptied store: begin again from what is stored."""
        self._outside.metrics.wrote("refused")
        _log.debug("write_refused", instance=self.target.instance_id, stored=repr(stored))
        base, self._base = self._base, stored
        same_life = base is not None and stored is not None and replace(stored, version=base.version) == base
        if stored is None or not same_life or self._index is None or self._index.version < stored.version:
            self._index = None

    def _doubt(self) -> None:
        self._outside.metrics.wrote("refused")
        self._read_base = False
        self._index = None

    def _lied(self, reason: str, detail: str) -> float:
        """Count it; the next poll asks for everything, and followers are told to load it."""
        self._outside.metrics.lied(reason)
        _log.warning("agent_contradicts_itself", instance=self.target.instance_id, reason=reason, detail=detail)
        self._index = None
        self._announce = True
        return self._settings.backoff_ms / 1_000

    async def _failed(self, error: StateCallError) -> float:
        self._failures += 1
        self._outside.metrics.polled(error.kind.lower())
        if error.kind == "INVALID":
            self._lied("invalid", str(error))
        if self._failures >= self._settings.failures_to_unreachable:
            await self._mark_unreachable(error)
            doublings = min(16, self._failures - self._settings.failures_to_unreachable)
            return min(self._settings.backoff_ms, self._settings.interval_ms << doublings) / 1_000
        return self._interval_s()

    async def _mark_unreachable(self, error: StateCallError) -> None:
        if self._marked or self._base is None:
            return
        if await self._outside.store.mark_unreachable(self.target.instance_id, self._base):
            self._outside.metrics.marked_unreachable()
            _log.warning("instance_unreachable", instance=self.target.instance_id, reason=error.kind)
            self._marked = True
        else:
            # Another collector moved it on: it can be reached from there.
            self._read_base = False

    def _interval_s(self) -> float:
        settings = self._settings
        return settings.interval_ms / 1_000 * (1 + settings.jitter * random.uniform(-1, 1))


async def _index_of(update: StateUpdate) -> CheckedIndex:
    if update.snapshot is not None and len(update.snapshot.hashes) > _INLINE_BYTES:
        return await asyncio.to_thread(CheckedIndex, update)
    return CheckedIndex(update)


def _base_of(update: StateUpdate) -> Base:
    return Base(update.incarnation, update.agent_epoch, update.version)
