"""A clock that a test moves by hand."""

from __future__ import annotations

import asyncio

_TURNS_TO_SETTLE = 20


class FakeClock:
    """Implements `dualmap.runtime.clock.Clock`; `advance` wakes sleepers in order and lets them run."""

    def __init__(self, now_s: float = 100.0) -> None:
        self._now_s = now_s
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        return self._now_s

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        if event.is_set() or timeout_s <= 0:
            await asyncio.sleep(0)
            return event.is_set()
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_s + timeout_s, sleeper))
        woken = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({sleeper, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        return event.is_set()

    async def settle(self) -> None:
        """Let everything that can run now run."""
        for _ in range(_TURNS_TO_SETTLE):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Move time forward, stopping at each sleeper's moment."""
        target_s = self._now_s + seconds
        await self.settle()
        while due := sorted((at_s, id(s), s) for at_s, s in self._sleepers if at_s <= target_s and not s.done()):
            at_s, _, sleeper = due[0]
            self._now_s = max(self._now_s, at_s)
            sleeper.set_result(None)
            await self.settle()
        self._now_s = target_s
        await self.settle()

    def jump(self, seconds: float) -> None:
        """Move time without letting anything run: a process that hung."""
        self._now_s += seconds
