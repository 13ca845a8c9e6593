"""Events of one request on their way to whoever follows it: in order, bounded, a pulse in silence. Knows no queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from dualmap.core.errors import DualMapError
from dualmap.rpc.request_events import AcceptOutcome
from dualmap.rpc.route_values import FirstToken, HttpChunk, Pulse, Tokens

MAX_PENDING_BYTES = 8 * 1024 * 1024
MAX_PENDING_EVENTS = 1_024

MAX_JOINED_BYTES = 64 * 1024
"""Waiting parts of an HTTP answer are joined up to here; more would only be copied again and again."""


class Outlet:
    """Put in by the agent, read by one follower. A follower too slow for the bounds is cut off."""

    def __init__(self) -> None:
        self._pending: deque[AcceptOutcome] = deque()
        self._pending_bytes = 0
        self._ended = False
        self._error: DualMapError | None = None
        self._wake = asyncio.Event()

    def put(self, event: AcceptOutcome) -> bool:
        """Add an event; tokens that still wait are batched, parts of an HTTP answer joined.

        False: the follower is too slow, nothing was added.
        """
        if self._ended:
            return True
        data = getattr(event, "data", b"")
        if self._pending_bytes + len(data) > MAX_PENDING_BYTES or len(self._pending) >= MAX_PENDING_EVENTS:
            return False
        self._pending_bytes += len(data)
        last = self._pending[-1] if self._pending else None
        if last is None:
            self._pending.append(event)
        elif isinstance(event, Tokens) and isinstance(last, Tokens):
            self._pending[-1] = Tokens(last.count + event.count, last.data + event.data)
        elif isinstance(event, HttpChunk) and isinstance(last, HttpChunk) and _may_join(last, event):
            self._pending[-1] = HttpChunk(last.status, last.headers, last.data + event.data)
        else:
            self._pending.append(event)
        self._wake.set()
        return True

    def end(self, error: DualMapError | None = None) -> None:
        """Nothing follows what was put; ``error`` is raised to the follower after it."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    @property
    def ended(self) -> bool:
        """Whether the end is known."""
        return self._ended

    async def follow(self, pulse_s: float) -> AsyncGenerator[AcceptOutcome]:
        """Events until the end, a Pulse after each ``pulse_s`` seconds without one. Raises the error put at the end."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            # One timer that looks again, not one an event: those would cost more than the events.
            nonlocal timer
            left_s = heard_s + pulse_s - loop.time()
            if left_s <= 0:
                self._wake.set()
            timer = loop.call_later(left_s if left_s > 0 else pulse_s, look)

        look()
        try:
            while True:
                while self._pending:
                    yield self._taken()
                if self._ended:
                    break
                self._wake.clear()
                heard_s = loop.time()
                await self._wake.wait()
                if not self._pending and not self._ended:
                    yield Pulse()
        finally:
            if timer is not None:
                timer.cancel()
        if self._error is not None:
            raise self._error

    def _taken(self) -> AcceptOutcome:
        event = self._pending.popleft()
        if isinstance(event, Tokens | HttpChunk | FirstToken):
            self._pending_bytes -= len(event.data)
        return event


def _may_join(last: HttpChunk, more: HttpChunk) -> bool:
    return not more.status and len(last.data) + len(more.data) <= MAX_JOINED_BYTES
