"""Tells watchers what changed, from the shard streams; reads nothing while nobody watches."""

from __future__ import annotations

import asyncio

from dualmap.runtime.clock import SystemClock
from dualmap.runtime.logs import get_log
from dualmap.store.connection import StoreError
from dualmap.store.state_store import StateStore
from services.statecollector.directory import Directory
from services.statecollector.metrics import CollectorMetrics
from services.statecollector.roster import Roster

BLOCK_MS = 100
_READ_COUNT = 512
RETRY_S = 0.5

_log = get_log("change_feed")


class ChangeFeed:
    """One loop for all watchers of the process. ``store`` is on a client patient enough to wait on streams."""

    def __init__(self, store: StateStore, roster: Roster, directory: Directory, metrics: CollectorMetrics) -> None:
        self._store = store
        self._roster = roster
        self._directory = directory
        self._metrics = metrics
        self._told: frozenset[str] = frozenset()

    async def run(self, stop: asyncio.Event) -> None:
        """Feed until ``stop``."""
        stopped = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                watched = asyncio.ensure_future(self._directory.watched())
                await asyncio.wait({stopped, watched}, return_when=asyncio.FIRST_COMPLETED)
                watched.cancel()
                if not stop.is_set():
                    await self._feed(stop)
        finally:
            stopped.cancel()

    async def _feed(self, stop: asyncio.Event) -> None:
        try:
            self._told = frozenset(self._roster.members)
            positions = await self._store.positions()
            while self._directory.has_watchers and not stop.is_set():
                entries = await self._store.read_stream(positions, BLOCK_MS, _READ_COUNT)
                positions.update((entry.shard, entry.position) for entry in entries)
                members = frozenset(self._roster.members)
                changed = {entry.instance_id for entry in entries} | (members - self._told)
                left = self._told - members
                self._told = members
                if changed or left:
                    await self._directory.tell(sorted(changed), sorted(left))
        except StoreError as error:
            self._metrics.feed_failed()
            _log.warning("feed_failed", error=type(error).__name__)
            await SystemClock().wait(stop, RETRY_S)
