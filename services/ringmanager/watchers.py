"""Callers that follow the ring: each gets every change from a short queue, and one that does not read is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from dualmap.core.errors import Overloaded
from dualmap.core.membership import RingSnapshot

QUEUED_RINGS = 16
"""Rings a reader may be behind; each is whole, so more would be memory spent on a reader that is gone."""

_RETRY_MS = 1_000


@dataclass(eq=False, slots=True)
class _Watcher:
    queue: asyncio.Queue[RingSnapshot | None] = field(default_factory=lambda: asyncio.Queue(QUEUED_RINGS))
    cut_off: bool = False


class WatcherHub:
    """All open watches of the process."""

    def __init__(self, heartbeat_s: float, on_cut: Callable[[], None], most: int = 4_096) -> None:
        """``most``: watches at once; one more is refused."""
        self._heartbeat_s = heartbeat_s
        self._on_cut = on_cut
        self._most = most
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._watchers)

    def publish(self, snapshot: RingSnapshot) -> None:
        """Tell every watcher; one whose queue is full is cut off instead."""
        for watcher in tuple(self._watchers):
            try:
                watcher.queue.put_nowait(snapshot)
            except asyncio.QueueFull:
                self._cut(watcher)

    def close(self) -> None:
        """End every watch: the process stops."""
        self._closed = True
        for watcher in tuple(self._watchers):
            _empty(watcher.queue)
            watcher.queue.put_nowait(None)

    async def watch(self, first: RingSnapshot | None) -> AsyncGenerator[RingSnapshot | None, None]:
        """``first`` at once, then each ring published; None is a sign of life.

        Raises Overloaded when cut off, or at once when there are too many.
        """
        watcher = _Watcher()
        if self._closed:
            return
        if len(self._watchers) >= self._most:
            raise Overloaded(_RETRY_MS, f"{self._most} watches are open")
        self._watchers.add(watcher)
        try:
            yield first
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        snapshot = await watcher.queue.get()
                except TimeoutError:
                    yield None
                    continue
                if watcher.cut_off:
                    raise Overloaded(_RETRY_MS, "this watcher reads too slowly")
                if snapshot is None:
                    return
                yield snapshot
        finally:
            self._watchers.discard(watcher)

    def _cut(self, watcher: _Watcher) -> None:
        self._watchers.discard(watcher)
        self._on_cut()
        watcher.cut_off = True
        _empty(watcher.queue)
        watcher.queue.put_nowait(None)


def _empty(queue: asyncio.Queue[RingSnapshot | None]) -> None:
    while not queue.empty():
        queue.get_nowait()
