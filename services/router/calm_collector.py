"""Keeps Python's collector away from calls: a route leaves no cycle behind, so a pass over what it keeps is a pause.

What is young is set aside without a look, four times a second; a whole pass every ten minutes takes what else left.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

WHOLE_EVERY_S = 600.0
"""A whole pass costs about 0.1 s with all answers of 30 s held: one call in several thousand meets it."""


class CalmCollector:
    """One a process. ``now_s`` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float], whole_every_s: float = WHOLE_EVERY_S) -> None:
        self.whole_passes = 0
        self._now_s = now_s
        self._every_s = whole_every_s
        self._due_s = now_s() + whole_every_s

    def start(self) -> None:
        """Collect once, then only by turns."""
        gc.collect()
        gc.freeze()
        gc.disable()

    async def turn(self) -> None:
        """Set aside what is young; when it is time, look at everything."""
        if self._now_s() >= self._due_s:
            self._due_s = self._now_s() + self._every_s
            self.whole_passes += 1
            gc.unfreeze()
            gc.collect()
        gc.freeze()

    def stop(self) -> None:
        """Back to the interpreter's own ways."""
        gc.unfreeze()
        gc.enable()
