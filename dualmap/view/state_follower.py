"""The instances' part of a follower: applies each step once, in order, and loads an instance whole when one is missing.

Positions may be set back for one instance; the others ignore what they have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from dualmap.core.errors import InvalidRequest
from dualmap.core.instance_view import InstanceView
from dualmap.core.kv_index import KvIndex
from dualmap.core.state import StateUpdate
from dualmap.store.keys import SHARDS, shard_of
from dualmap.store.packing import PackedChange, UnreadableValueError
from dualmap.store.state_store import StateEntry, StateStore, StoredState
from dualmap.store.streams import START, StreamEntry, position_key
from dualmap.view.cluster_view import ClusterView, WholeState
from dualmap.view.events import ViewEvent

_RECORD_BYTES = 9
_CHUNK_BYTES = 1_024 * _RECORD_BYTES
"""Changes applied under one hold of the lock: about a millisecond on an index of 100,000 blocks."""

_LOAD_AT_ONCE = 16
"""Whole states asked for in one round trip, so that an answer stays within the socket timeout."""

_RELOAD_PAUSE_MS = 1_000.0
"""Between two loads of one instance for a fault: an agent that contradicts itself must not cost more."""

_Order = tuple[int, int]
_BEGIN: _Order = (0, 0)


@dataclass(slots=True)
class _Progress:
    """What was loaded of an instance, and when it may be loaded again for a fault."""

    loaded_from: _Order = _BEGIN
    load_version: int = 0
    reload_at_ms: float = 0.0


class StateFollower:
    """Applies the entries of all shard streams to a view."""

    def __init__(self, view: ClusterView, store: StateStore) -> None:
        self.store = store
        self.positions: dict[int, str] = dict.fromkeys(range(SHARDS), START)
        self._view = view
        self._progress: dict[str, _Progress] = {}
        self._due: set[str] = set()
        self._newest: dict[int, _Order] = dict.fromkeys(range(SHARDS), _BEGIN)

    def note(self, positions: dict[int, str]) -> None:
        """Follow from these positions on; what lies before them is in what is loaded next."""
        self.positions = dict(positions)
        self._newest = {shard: position_key(position) for shard, position in positions.items()}

    async def load(self, instance_ids: tuple[str, ...]) -> None:
        """Load these instances whole and set their shards back to where each must be followed from."""
        for first in range(0, len(instance_ids), _LOAD_AT_ONCE):
            these = instance_ids[first : first + _LOAD_AT_ONCE]
            try:
                states = await self.store.load(these)
            except UnreadableValueError as error:
                if len(these) > 1:
                    # The others of this round trip are not to suffer for it.
                    for name in these:
                        await self.load((name,))
                    continue
                self._due.difference_update(these)
                self._view.count(ViewEvent.UNREADABLE, str(error))
                continue
            # Only now: where the store did not answer, they are still due when it is back.
            self._due.difference_update(these)
            for state in states.values():
                self._adopt(state)

    async def reload_due(self) -> None:
        """Load the instances that showed a fault, each at most once a second. O(1) where none did."""
        if len(self._progress) > len(self._view.instances):
            for name in self._progress.keys() - self._view.instances.keys():
                del self._progress[name]
        if not self._due:
            return
        now_ms = self._view.clock_ms()
        self._due.intersection_update(self._progress)
        due = tuple(name for name in self._due if now_ms >= self._progress[name].reload_at_ms)
        for name in due:
            self._progress[name].reload_at_ms = now_ms + _RELOAD_PAUSE_MS
        await self.load(due)

    async def apply(self, entry: StreamEntry) -> None:
        """Apply one entry, unless it is of a stranger or already in what was loaded."""
        known = self.store.entry_of(entry)
        order = position_key(entry.position)
        self.positions[known.shard] = entry.position
        first_time = order > self._newest[known.shard]
        if first_time:
            self._newest[known.shard] = order
        view = self._view.instances.get(known.instance_id)
        if view is None or order <= self._progress_of(known.instance_id).loaded_from:
            return
        # Reachability is not versioned: when a shard was set back, only what is read for the first time tells it.
        if first_time and view.heard_at_ms is not None:
            self._view.say_reachable(known.instance_id, known.reachable)
        if known.unreadable and first_time:
            self._fault(ViewEvent.UNREADABLE, known.instance_id)
        elif known.change is not None:
            await self._apply_change(view, known, known.change)

    async def _apply_change(self, view: InstanceView, entry: StateEntry, change: PackedChange) -> None:
        name = entry.instance_id
        same_life = (change.incarnation, change.agent_epoch) == (view.incarnation, view.agent_epoch)
        if change.full:
            if not same_life or change.version > view.version:
                self._due.add(name)
                self._progress_of(name).reload_at_ms = 0.0
            return
        if view.heard_at_ms is None or not same_life or change.since > view.version:
            self._fault(ViewEvent.GAP, name)
            return
        heard_at_ms = view.heard_at_ms
        older = change.version < self._progress_of(name).load_version
        diverged = view.diverged
        try:
            update = await self._apply_all_but_last(view, _update_of(name, change, with_load=not older))
            with self._view.lock:
                view.apply(update, self._view.clock_ms())
                if older:
                    view.heard_at_ms = heard_at_ms
        except InvalidRequest:
            self._fault(ViewEvent.UNREADABLE, name)
            return
        if view.diverged != diverged:
            self._fault(ViewEvent.DIGEST, name)

    async def _apply_all_but_last(self, view: InstanceView, update: StateUpdate) -> StateUpdate:
        changes = update.changes
        if len(changes) <= _CHUNK_BYTES or update.version <= view.version:
            return update
        while len(changes) > _CHUNK_BYTES:
            with self._view.lock:
                view.kv.apply(changes[:_CHUNK_BYTES])
            changes = changes[_CHUNK_BYTES:]
            # Threads that wait for the lock get it, and so do the loop's other tasks.
            await asyncio.sleep(0)
        return replace(update, changes=changes)

    def _adopt(self, state: StoredState) -> None:
        head = state.head
        index = KvIndex()
        try:
            index.replace(state.snapshot)
        except InvalidRequest as error:
            self._view.count(ViewEvent.UNREADABLE, f"{head.instance_id}: {error}")
            return
        progress = self._progress_of(head.instance_id)
        progress.loaded_from = position_key(state.position)
        progress.load_version = head.base.version
        self._view.adopt_state(
            WholeState(
                instance_id=head.instance_id,
                incarnation=head.base.incarnation,
                agent_epoch=head.base.agent_epoch,
                version=head.base.version,
                index=index,
                index_version=state.snapshot_version,
                load=head.load,
                reachable=head.reachable,
                heard_at_ms=self._view.clock_ms() - head.age_ms,
            )
        )
        if state.snapshot_version == head.base.version and index.digest != head.kv_digest:
            self._fault(ViewEvent.DIGEST, head.instance_id)
        shard = shard_of(head.instance_id)
        # An unreachable instance may lie behind the trim, and is not asked for until it returns.
        if head.reachable and progress.loaded_from < position_key(self.positions[shard]):
            self.positions[shard] = state.position

    def _fault(self, event: ViewEvent, instance_id: str) -> None:
        self._progress_of(instance_id)
        if instance_id not in self._due:
            self._due.add(instance_id)
            self._view.count(event, instance_id)

    def _progress_of(self, instance_id: str) -> _Progress:
        return self._progress.setdefault(instance_id, _Progress())


def _update_of(instance_id: str, change: PackedChange, *, with_load: bool) -> StateUpdate:
    return StateUpdate(
        instance_id=instance_id,
        incarnation=change.incarnation,
        agent_epoch=change.agent_epoch,
        version=change.version,
        since=change.since,
        load=change.load if with_load else None,
        changes=change.changes,
        kv_digest=change.kv_digest,
        kv_blocks=change.kv_blocks,
    )
