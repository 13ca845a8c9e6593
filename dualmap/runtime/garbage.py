"""Full garbage collections kept out of the way: what its start made is never walked, the rest in calm moments.

A full collection over an agent's modules alone stops its loop for 25 to 40 ms. It is for processes, not for libraries.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from dualmap.runtime.clock import Clock, SystemClock

LOOK_S = 10.0
LATEST_S = 600.0
"""A service that is never calm collects all the same."""

_NEVER = 1 << 30


class CalmCollector:
    """Makes the full collections of the process; the young generations stay Python's own affair."""

    def __init__(self, calm: Callable[[], bool], clock: Clock | None = None) -> None:
        """``calm``: whether a stop of some milliseconds hurts nobody now."""
        self._calm = calm
        self._clock = clock or SystemClock()
        self._last_s = self._clock.now_s()

    async def run(self, stop: asyncio.Event) -> None:
        """Freeze what is there, then look every 10 s until ``stop``; automatic full collections end for good."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        while not await self._clock.wait(stop, LOOK_S):
            self.look()

    def look(self) -> None:
        """Collect if it is calm, or has not been for too long."""
        if self._calm() or self._clock.now_s() - self._last_s >= LATEST_S:
            gc.collect()
            self._last_s = self._clock.now_s()
