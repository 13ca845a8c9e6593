"""Time for loops and leases: monotonic seconds and a wait that a stop ends at once. Never the wall clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time of this process; tests bring one that they move by hand."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never falls."""
        ...

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait until the event is set (True) or the time is over (False)."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never falls."""
        return time.monotonic()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait until the event is set (True) or the time is over (False)."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await event.wait()
        except TimeoutError:
            return event.is_set()
        return True
