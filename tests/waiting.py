"""Bounded waiting for a condition, for what happens in another process or task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Return when the condition holds; TimeoutError when it does not within ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.005)
