"""Whether one more call may wait: a burst may, a queue that stands may not.

It knows only how many wait and what time it is; who waits is the server's affair.
"""

from __future__ import annotations

IN_ORDER = 64
"""Calls that may wait for as long as it takes: as many callers, each with one call, are never refused."""

FEW = 4
"""Calls that may wait in overload: enough to keep a thread busy. Each waits for several refusals too, so few are soon
served: with 16 the half of them took 6.4 ms, with 4 they took 2.4."""

CALM_S = 0.25
"""Overload is over when so long nobody had to be refused: longer than a gap between bursts of a flood."""


class Admission:
    """One queue's rule. More than ``IN_ORDER`` waiting for ``burst_s`` is overload, and then only ``FEW`` may wait."""

    __slots__ = ("_burst_s", "_crowded_s", "_most", "_refused_s", "overloaded")

    def __init__(self, most: int, burst_s: float) -> None:
        """``most`` may wait in a burst."""
        self._most = most
        self._burst_s = burst_s
        self._crowded_s: float | None = None
        self._refused_s = 0.0
        self.overloaded = False

    def admits(self, waiting: int, now_s: float) -> bool:
        """Whether a call that comes now may wait behind ``waiting`` others; ``now_s`` is a monotonic clock's."""
        if self.overloaded:
            if waiting < FEW:
                self.overloaded = now_s - self._refused_s < CALM_S
                return True
            self._refused_s = now_s
            return False
        if waiting <= IN_ORDER:
            self._crowded_s = None
            return waiting < self._most
        if self._crowded_s is None:
            self._crowded_s = now_s
        if now_s - self._crowded_s < self._burst_s:
            return waiting < self._most
        self.overloaded, self._crowded_s, self._refused_s = True, None, now_s
        return False
