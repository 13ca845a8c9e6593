"""Keeps a view up to date from Redis streams; a missing step or a wrong digest loads that instance whole.

Redis gone is no error here: the view stays as it is, degraded, until Redis answers with a ring that is not older.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from redis.asyncio import Redis

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingSnapshot
from dualmap.store.connection import StoreError
from dualmap.store.keys import SHARDS
from dualmap.store.packing import UnreadableValueError
from dualmap.store.ring_store import RingStore
from dualmap.store.state_store import StateStore
from dualmap.store.streams import START, StreamEntry, position_key, read_streams
from dualmap.view.cluster_view import ClusterView
from dualmap.view.events import ViewEvent
from dualmap.view.ring_file import RingFile
from dualmap.view.state_follower import StateFollower

_LOST = (StoreError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """``block_ms``, and the 100 ms by which servers end a wait late, must be well below the client's socket timeout.

    ``gather_ms``: pause after entries were read, so that the next read finds several: a read costs as much as ten
    entries, and a view is a poll old anyway. ``tick_ms``: how often time passes for the view.
    """

    block_ms: int = 100
    gather_ms: float = 5.0
    read_count: int = 512
    tick_ms: float = 500.0
    epoch_check_ms: float = 1_000.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0


class Follower:
    """Fills one view. All of it runs in the loop that calls `run`, which may be a thread's own."""

    def __init__(
        self,
        view: ClusterView,
        client: Redis,
        pool: str,
        options: FollowerOptions | None = None,
        ring_file: RingFile | None = None,
    ) -> None:
        self.view = view
        self._client = client
        self._rings = RingStore(client, pool)
        states = StateStore(client, pool)
        self._states = StateFollower(view, states)
        self._streams = {states.keys.stream(shard): shard for shard in range(SHARDS)}
        self._options = options or FollowerOptions()
        self._ring_file = ring_file
        self._ring_position = START
        self._synced = False
        self._lost = False
        self._backward = False
        self._file_tried = False
        self._tick_at_ms = 0.0
        self._epoch_check_at_ms = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop``, within one blocking read of it, or until the task is cancelled."""
        failures = 0
        while not stop.is_set():
            try:
                found = await self.step()
                failures = 0
                if found:
                    await asyncio.sleep(self._options.gather_ms / 1_000)
            except _LOST as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    # The client may make an error of its own of a cancellation that meets it while it connects.
                    raise asyncio.CancelledError from error
                failures += 1
                await self._store_lost(error)
                await self._back_off(stop, failures)

    async def step(self) -> int:
        """Synchronise if that is due, else read once and apply: entries read. Raises what the store raises."""
        if self._lost and self._synced:
            self._synced = await self._resume()
        if not self._synced:
            await self._synchronise()
            return 0
        after = {self._rings.keys.epochs: self._ring_position}
        after.update((stream, self._states.positions[shard]) for stream, shard in self._streams.items())
        entries = await read_streams(self._client, after, self._options.block_ms, self._options.read_count)
        await self._apply(entries)
        await self._states.reload_due()
        await self._pass_time()
        return len(entries)

    async def _apply(self, entries: list[StreamEntry]) -> None:
        ring_moved = False
        for entry in entries:
            if entry.stream in self._streams:
                await self._states.apply(entry)
            else:
                ring_moved, self._ring_position = True, entry.position
        if ring_moved:
            await self._states.load(await self._load_ring())

    async def _resume(self) -> bool:
        """Go on from where the store was lost, if it still has what was read: whether it does.

        What it lost of its tail alone shows as a gap or a digest, instance by instance.
        """
        newest = await self._states.store.positions()
        if any(position_key(newest[shard]) < position_key(at) for shard, at in self._states.positions.items()):
            return False
        new = await self._load_ring()
        if self.view.degraded:
            return False
        await self._states.load(new)
        self._lost = False
        self.view.count(ViewEvent.STORE_BACK, "resumed")
        return True

    async def _synchronise(self) -> None:
        self._states.note(await self._states.store.positions())
        await self._load_ring()
        await self._states.load(tuple(self.view.instances))
        self._synced = True
        if self._lost:
            self._lost = False
            self.view.count(ViewEvent.STORE_BACK, "loaded anew")

    async def _load_ring(self) -> tuple[str, ...]:
        """Take the stored ring over if it is not older: the instances that are new and not loaded yet."""
        new: tuple[str, ...] = ()
        try:
            loaded = await self._rings.load_with_position()
        except UnreadableValueError as error:
            self.view.count(ViewEvent.UNREADABLE, str(error))
            return new
        self._ring_position = loaded.position
        ring = loaded.ring
        if ring is None or ring.epoch < self.view.epoch:
            self._epoch_backward(ring.epoch if ring is not None else 0)
            return new
        self._backward = False
        if ring.epoch > self.view.epoch or self.view.degraded:
            try:
                new = self.view.adopt_ring(ring)
            except InvalidRequest as error:
                self.view.count(ViewEvent.UNREADABLE, str(error))
                return new
            await self._save(ring)
        self.view.degraded = False
        return new

    def _epoch_backward(self, stored_epoch: int) -> None:
        self.view.degraded = True
        if self.view.epoch == 0 or self._backward:
            return
        self._backward = True
        self._synced = False
        self.view.count(ViewEvent.EPOCH_BACKWARD, f"stored {stored_epoch}, held {self.view.epoch}")

    async def _pass_time(self) -> None:
        now_ms = self.view.clock_ms()
        if now_ms >= self._tick_at_ms:
            self._tick_at_ms = now_ms + self._options.tick_ms
            self.view.tick()
        if now_ms >= self._epoch_check_at_ms:
            self._epoch_check_at_ms = now_ms + self._options.epoch_check_ms
            # A store that was emptied sends nothing: it must be asked.
            if await self._rings.epoch() != self.view.epoch:
                await self._states.load(await self._load_ring())

    async def _save(self, ring: RingSnapshot) -> None:
        if self._ring_file is None:
            return
        try:
            await asyncio.to_thread(self._ring_file.save, ring)
        except OSError as error:
            self.view.count(ViewEvent.RING_FILE_BROKEN, str(error))

    async def _store_lost(self, error: BaseException) -> None:
        self.view.degraded = True
        if not self._lost:
            self._lost = True
            self.view.count(ViewEvent.STORE_LOST, type(error).__name__)
        if self.view.ring is None:
            self._start_from_file()
        self.view.tick()

    def _start_from_file(self) -> None:
        if self._ring_file is None or self._file_tried:
            return
        self._file_tried = True
        try:
            ring = self._ring_file.load(self.view.pool)
            if ring is not None:
                self.view.adopt_ring(ring)
                self.view.count(ViewEvent.STARTED_FROM_FILE, f"epoch {ring.epoch}")
        except (OSError, UnreadableValueError, InvalidRequest) as error:
            self.view.count(ViewEvent.RING_FILE_BROKEN, str(error))

    async def _back_off(self, stop: asyncio.Event, failures: int) -> None:
        longest_s = min(self._options.backoff_max_s, self._options.backoff_min_s * 2 ** min(failures, 16))
        try:
            async with asyncio.timeout(longest_s * random.uniform(0.5, 1.0)):
                await stop.wait()
        except TimeoutError:
            return
