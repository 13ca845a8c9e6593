"""A task that runs beside its owner and ends with it; one that ends too early turns a vital health component red."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dualmap.runtime.health import Component
from dualmap.runtime.logs import get_log

_log = get_log("background")


@asynccontextmanager
async def running(name: str, run: Callable[[asyncio.Event], Awaitable[None]], vital: Component) -> AsyncIterator[None]:
    """Run ``run(stop)`` inside the block; leaving it sets ``stop`` and waits for the end."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(stop))

    def ended(_task: asyncio.Future[None]) -> None:
        if not stop.is_set():
            vital.fail(f"{name} ended by itself")

    task.add_done_callback(ended)
    try:
        yield
    finally:
        stop.set()
        try:
            await task
        except Exception as error:
            # Its owner is leaving: there is nobody left who could act on it.
            _log.exception("background_failed", task=name, error=type(error).__name__)
